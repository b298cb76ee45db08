// Intel's matrix units: 8 registers of 16 rows of 64 bytes, multiplied as bfloat16.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define JAXSERVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxserve::amx {

constexpr int kSide = 16;              // rows of a tile, and its columns of float32
constexpr int kDepth = 2 * kSide;      // bfloat16 in a row
constexpr int kTile = kSide * kDepth;  // bfloat16 in a tile

#if defined(JAXSERVE_AMX)

// Asks the kernel for the registers' state, for the whole process. False: it has none to give.
inline bool request() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kSide, kSide, kSide, kSide, kSide, kSide, kSide, kSide};
};

inline constexpr Shapes kFull{};

// The registers are this thread's while one of these lives; every tile is of the full size.
struct Tiles {
  Tiles() { asm volatile("ldtilecfg %0" ::"m"(kFull)); }
  ~Tiles() { asm volatile("tilerelease" ::); }
  Tiles(const Tiles&) = delete;
};

// GCC's intrinsics do not say that they read memory: a store before one may be dropped.
template <int N>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}

template <int N>
inline void load(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(N) : "memory");
}

template <int N>
inline void store(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(N) : "memory");
}

// C[i][j] += sum over p of A[i][2p] B[p][2j] + A[i][2p + 1] B[p][2j + 1]: of B pairs of rows lie
// together. C is float32.
template <int C, int A, int B>
inline void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace jaxserve::amx
