// Products of tiles, and what makes an operand of them.

#pragma once

#include "amx.h"
#include "vector.h"

namespace jaxserve::amx {

#if defined(JAXSERVE_AMX)

// Registers 0 to 3 hold sums [16 * Groups, 32], float32 in rows of row_bytes.
template <int Groups>
inline void clear() {
  zero<0>(), zero<1>();
  if constexpr (Groups == 2) zero<2>(), zero<3>();
}

template <int Groups>
inline void load_sums(const float* from, int64_t row_bytes) {
  load<0>(from, row_bytes), load<1>(from + kSide, row_bytes);
  if constexpr (Groups == 2) {
    const float* below = from + kSide * row_bytes / sizeof(float);
    load<2>(below, row_bytes), load<3>(below + kSide, row_bytes);
  }
}

template <int Groups>
inline void store_sums(float* to, int64_t row_bytes) {
  store<0>(to, row_bytes), store<1>(to + kSide, row_bytes);
  if constexpr (Groups == 2) {
    float* below = to + kSide * row_bytes / sizeof(float);
    store<2>(below, row_bytes), store<3>(below + kSide, row_bytes);
  }
}

// Adds a [Groups, blocks, parts, 16, 32] times b [blocks, parts, 2, 16 pairs, 16, 2] to the sums.
template <int AParts, int BParts, int Groups>
inline void accumulate(const BFloat16* a, const BFloat16* b, int64_t blocks) {
  constexpr int kRowBytes = kDepth * sizeof(BFloat16);
  const BFloat16* below = a + blocks * AParts * kTile;
  auto load_a = [&](int64_t block, int part) {
    load<4>(a + (block * AParts + part) * kTile, kRowBytes);
    if constexpr (Groups == 2) load<5>(below + (block * AParts + part) * kTile, kRowBytes);
  };
  auto load_b = [&](int64_t block, int part) {
    load<6>(b + (block * BParts + part) * 2 * kTile, kRowBytes);
    load<7>(b + ((block * BParts + part) * 2 + 1) * kTile, kRowBytes);
  };
  auto add = [] {
    multiply<0, 4, 6>(), multiply<1, 4, 7>();
    if constexpr (Groups == 2) multiply<2, 5, 6>(), multiply<3, 5, 7>();
  };
  for (int64_t block = 0; block < blocks; ++block) {
    // Of two parts: low x high, high x high, high x low. Low x low is below float32's rounding.
    load_a(block, AParts - 1);
    load_b(block, 0);
    add();
    if constexpr (AParts == 2) load_a(block, 0), add();
    if constexpr (BParts == 2) load_b(block, 1), add();
  }
}

// x as bfloat16, the first of two parts or all there is; what its rounding left is `after` behind.
template <int Parts>
inline void split(Vec x, BFloat16* to, int64_t after = kTile) {
  jaxserve::store(to, x);
  if (Parts == 2) jaxserve::store(to + after, x - jaxserve::load(to));
}

// a and b as bfloat16, lane by lane in turn.
inline __m512i pairs(Vec a, Vec b) {
  const __m512i turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a));
  return _mm512_permutexvar_epi16(turn, (__m512i)both);
}

inline Vec even(__m512i pairs) { return reinterpret_cast<Vec>(_mm512_slli_epi32(pairs, 16)); }
inline Vec odd(__m512i pairs) {
  return reinterpret_cast<Vec>(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

// 16 x 16 of 32 bits.
inline void transpose(__m512i (&rows)[kSide]) {
  __m512i some[kSide];
#pragma GCC unroll 8
  for (int i = 0; i < kSide; i += 2) {
    some[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    some[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kSide; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(some[i], some[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(some[i], some[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(some[i + 1], some[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(some[i + 1], some[i + 3]);
  }
  // Of quarter n of rows[4 * i + c]: column 4 * n + c of rows 4 * i to 4 * i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512i even_low = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88);
    __m512i even_high = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88);
    __m512i odd_low = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xdd);
    __m512i odd_high = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xdd);
    some[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    some[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    some[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    some[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) rows[i] = some[i];
}

#endif

}  // namespace jaxserve::amx
