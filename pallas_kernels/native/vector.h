// Vectors as wide as the machine's registers, in GCC's and Clang's portable notation, and the one
// register tile that every product here is made of.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// Wherever p points: Clang takes a vector behind a pointer for aligned, whatever its type says.
template <typename V>
inline V unaligned(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// GCC moves 64 bytes as two halves through the stack, and a load of both then waits for its stores:
// hence the intrinsics.
#if defined(__AVX512F__)
inline Vec load(const float* p) { return reinterpret_cast<Vec>(_mm512_loadu_ps(p)); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, reinterpret_cast<__m512>(x)); }
#else
inline Vec load(const float* p) { return unaligned<Vec>(p); }
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
#endif

// Asks for a cache line in the L2 cache. GCC takes a function that does nothing else for one without
// effect, and drops its calls: hence the assembly.
inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// bfloat16 is the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// GCC converts int8 vectors lane by lane unless told how.
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#elif defined(__AVX2__)
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return out;
#endif
}

using Float16 = _Float16;

inline Vec load(const Float16* p) {
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return out;
}
inline void store(Float16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = x[i];
}

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

// Lanes of bfloat16 to float32 and back.
inline Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
  auto bits = unaligned<Lanes<uint16_t>>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, Lanes<uint32_t>) << 16);
#endif
}

inline void store(BFloat16* p, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      (__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#else
  auto bits = reinterpret_cast<Lanes<uint32_t>>(x);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bits = x != x ? Lanes<uint32_t>{} + 0x7fc0 : bits;
  auto halves = __builtin_convertvector(bits, Lanes<uint16_t>);
  std::memcpy(p, &halves, sizeof halves);
#endif
}

template <typename T>
inline void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

template <typename T>
inline void narrow(const float* from, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) narrow(from[i], to + i);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// Lane i of the result is lane index(i) of a and b laid end to end.
template <typename Index, int... I>
inline Vec shuffle(Vec a, Vec b, Index index, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, index(I)...);
}

// Adds the first and second halves of all groups of `Group` lanes: half as many lanes a group, and
// those of b behind those of a.
template <int Group>
inline Vec halve(Vec a, Vec b) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  constexpr auto low = [](int i) { return i / (Group / 2) * Group + i % (Group / 2); };
  constexpr auto high = [](int i) { return i / (Group / 2) * Group + i % (Group / 2) + Group / 2; };
  return shuffle(a, b, low, lanes) + shuffle(a, b, high, lanes);
}

// out[i] = the sum of x[i]'s lanes, always in the same order.
inline void sum(const Vec (&x)[4], float* out) {
  Vec all = halve<kLanes / 2>(halve<kLanes>(x[0], x[1]), halve<kLanes>(x[2], x[3]));
  if constexpr (kLanes >= 16) all = halve<4>(all, all);  // [sums of pairs | the same again]
  if constexpr (kLanes >= 8) all = halve<2>(all, all);
  for (int i = 0; i < 4; ++i) out[i] = all[i];
}

inline float sum(Vec x) {
  float out[4];
  sum({x, Vec{}, Vec{}, Vec{}}, out);
  return out[0];
}

inline Vec absolute(Vec x) { return x < 0 ? -x : x; }

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

// x / (1 + e^-x)
inline Vec silu(Vec x) {
  Vec e = exp_of_negative(-absolute(x));
  return x * (x < 0 ? e : splat(1.0f)) / (1.0f + e);
}

inline Vec tanh(Vec x) {
  Vec e = exp_of_negative(-2.0f * absolute(x));
  Vec y = (1.0f - e) / (1.0f + e);
  return x < 0 ? -y : y;
}

// By tanh, as models use it: Hendrycks & Gimpel 2016.
inline Vec gelu(Vec x) {
  return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
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
