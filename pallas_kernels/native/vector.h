// Vectors as wide as the machine's registers, in GCC's and Clang's portable notation, and the one
// register tile that every product here is made of.

#pragma once

#include <cstdint>
#include <cstring>

namespace jaxserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRows = 12;  // of a tile: 24 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRows = 6;  // 12 accumulators of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kRows = 6;
#endif
constexpr int kPanel = 32;  // columns of a packed operand that lie together

template <typename T>
using Lanes __attribute__((vector_size(kLanes * sizeof(T)), aligned(sizeof(T)), may_alias)) = T;
using Vec = Lanes<float>;
using IntVec = Lanes<int32_t>;

inline Vec splat(float x) { return x - Vec{}; }  // adding 0 would turn -0 into 0: an instruction

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

// bfloat16 is the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

inline Vec load(const int8_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const Lanes<int8_t>*>(p), Vec);
}

using Float16 = _Float16;

inline float widen(float x) { return x; }
inline float widen(Float16 x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(BFloat16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, Float16* out) { *out = x; }
inline void narrow(float x, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bool nan = x != x;
  out->bits = nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // nearest, ties to even
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

template <typename Reduce>
inline float fold(Vec x, Reduce reduce) {
  alignas(64) float part[kLanes];
  store(part, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = reduce(part[i], part[i + width]);
  return part[0];
}

inline float sum(Vec x) {
  return fold(x, [](float a, float b) { return a + b; });
}

// e^x for x <= 0: a polynomial over a reduced argument (Cephes expf), 2 ulp. Below e^-87 it stays
// at that; NaN stays NaN.
inline Vec exp_of_negative(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  Vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the integer
  Vec n = shifted - 12582912.0f;
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vec y = p * r * r + r + 1.0f;
  IntVec exponent = (reinterpret_cast<IntVec>(shifted) - 0x4b400000 + 127) << 23;
  return y * reinterpret_cast<Vec>(exponent);
}

// c[m][:] += sum over k of a(m, k) * b(k, :), for M rows and V vectors of columns. Every element is
// summed in the order of k alone, whatever M: a row's result does not depend on its neighbours.
template <int M, int V, typename A, typename B>
inline void tile(int64_t depth, A a, B b, float* c, int64_t row_stride) {
  Vec acc[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[m][v] = load(c + m * row_stride + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = b(k, v);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vec x = splat(a(m, k));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[m][v] += x * row[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + m * row_stride + v * kLanes, acc[m][v]);
}

// Calls f with the rows as a constant: f.template operator()<M>().
template <int Most, typename F>
inline void with_rows(int rows, F&& f) {
  if constexpr (Most > 0) {
    if (rows == Most)
      f.template operator()<Most>();
    else
      with_rows<Most - 1>(rows, f);
  }
}

}  // namespace jaxserve
