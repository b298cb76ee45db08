// The left side of a product: rows of x that are not all zeros (a step's padding is), perhaps
// normalised, laid out as the product reads them, in memory of the calling thread.

#pragma once

#include <vector>

#include "amx.h"
#include "numbers.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxserve {

struct Norm {
  const float* weight;  // null: none
  float eps;
};

struct Inputs {
  Numbers x;  // [rows, depth]
  int64_t num_rows, depth;
  Norm norm;
  std::vector<int64_t> live{}, zeros{};  // rows

  void find_live() {
    for (int64_t row = 0; row < num_rows; ++row) (is_live(row) ? live : zeros).push_back(row);
  }

  // Hands out the n-th live row, a vector at a time: put(k, x). What is past its end is 0.
  template <typename Put>
  void read(int64_t nth, Put put) const {
    int64_t row = live[nth] * depth, whole = depth / kLanes * kLanes;
    alignas(64) float rest[kLanes] = {}, rest_weight[kLanes] = {};
    for (int64_t k = whole; k < depth; ++k) rest[k - whole] = x.get(row + k);
    Vec scale = splat(1.0f);
    if (norm.weight) {
      Vec squares{};
      for (int64_t k = 0; k < whole; k += kLanes) {
        Vec some = x.load(row + k);
        squares += some * some;
      }
      Vec last = load(rest);
      float mean = sum(squares + last * last) / depth;
      scale = splat(1 / std::sqrt(mean + norm.eps));
      for (int64_t k = whole; k < depth; ++k) rest_weight[k - whole] = norm.weight[k];
    }
    auto scaled = [&](Vec some, const float* weight) {
      return norm.weight ? some * scale * load(weight) : some;
    };
    for (int64_t k = 0; k < whole; k += kLanes) put(k, scaled(x.load(row + k), norm.weight + k));
    if (whole < depth) put(whole, scaled(load(rest), rest_weight));
  }

  // [groups of kRows rows, depth, rows of the group]: a register tile reads them in order.
  const float* as_groups(xla::ffi::ThreadPool& pool) const {
    thread_local Scratch<float> scratch;
    int64_t rows = live.size(), groups = (rows + kRows - 1) / kRows;
    float* packed = scratch.get(rows * depth);
    parallel_for(pool, groups, [&](int64_t group) {
      int64_t first = group * kRows;
      int count = std::min<int64_t>(kRows, rows - first);
      for (int m = 0; m < count; ++m)
        read(first + m, [&](int64_t k, Vec some) {
          float* to = packed + first * depth + k * count + m;
          for (int i = 0; i < std::min<int64_t>(kLanes, depth - k); ++i) to[i * count] = some[i];
        });
    });
    return packed;
  }

  // [groups of 16 rows, ceil(depth / 32), parts, 16, 32]: bfloat16 tiles, zeros past the depth; past
  // the last row is whatever was there, which only sums that nobody reads are made of.
  // Two parts: what the first one's rounding left is in the second.
  const BFloat16* as_tiles(xla::ffi::ThreadPool& pool, int parts) const {
    using namespace amx;
    thread_local Scratch<BFloat16> scratch;
    int64_t rows = live.size(), groups = (rows + kSide - 1) / kSide;
    int64_t blocks = (depth + kDepth - 1) / kDepth;
    BFloat16* packed = scratch.get(groups * blocks * parts * kTile);
    parallel_for(pool, groups, [&](int64_t group) {
      BFloat16* tiles = packed + group * blocks * parts * kTile;
      for (int64_t m = 0; m < std::min<int64_t>(kSide, rows - group * kSide); ++m) {
        auto put = [&](int64_t k, Vec some) {
          BFloat16* to = tiles + k / kDepth * parts * kTile + m * kDepth + k % kDepth;
          store(to, some);
          if (parts == 2) store(to + kTile, some - load(to));
        };
        read(group * kSide + m, put);
        for (int64_t k = (depth + kLanes - 1) / kLanes * kLanes; k < blocks * kDepth; k += kLanes)
          put(k, Vec{});
      }
    });
    return packed;
  }

 private:
  // NaN is not zero, -0 is.
  bool is_live(int64_t row) const {
    int64_t k = row * depth, end = k + depth;
    if (x.get(k) != 0) return true;
    IntVec bits{};
    for (; k + kLanes <= end; k += kLanes)
      bits |= reinterpret_cast<IntVec>(x.load(k)) & 0x7fffffff;
    for (; k < end; ++k)
      if (x.get(k) != 0) return true;
    for (int i = 0; i < kLanes; ++i)
      if (bits[i] != 0) return true;
    return false;
  }
};

}  // namespace jaxserve
