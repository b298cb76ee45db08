// Attention of many tokens of a row.

#pragma once

#include "cache.h"

namespace jaxserve {

constexpr int kPrefillFloats = 2 * kPanel + 2 * kKeys + 1;  // of scratch, for each of the head dim

// A block widened to float32, scales included; float32 stays where it lies.
struct WideBlock {
  const float *k[kKeys], *v[kKeys];

  template <typename C>
  void widen_block(const Shape& s, const Block<C>& block, int64_t keys, float* copies) {
    for (int64_t j = 0; j < keys; ++j) {
      if constexpr (std::is_same_v<C, float>) {
        k[j] = block.k[j], v[j] = block.v[j];
      } else {
        float *k_copy = copies + 2 * j * s.padded, *v_copy = k_copy + s.padded;
        k[j] = k_copy, v[j] = v_copy;
        bool scaled = std::is_same_v<C, int8_t>;
        for (int64_t d = 0; d < s.padded; d += kLanes) {
          store(k_copy + d, load(block.k[j] + d) * (scaled ? block.k_scale[j] : 1));
          store(v_copy + d, load(block.v[j] + d) * (scaled ? block.v_scale[j] : 1));
        }
      }
    }
  }
};

template <typename C, typename Q>
void prefill(const Shape& s, const Settings& set, const Cache<C>& cache, const Rows& rows,
             const Rope& rope, const Item& item, const Q* q, Q* out, std::vector<float>& scratch,
             Block<C>& block) {
  scratch.resize(kPrefillFloats * s.padded + (kKeys + 4) * kPanel);
  int64_t first_token = rows.row_start[item.row];
  int64_t length = rows.kv_len[item.row];
  int64_t start = length - (rows.row_start[item.row + 1] - first_token);
  float* queries = scratch.data();                   // [padded, kPanel]
  float* values = queries + s.padded * kPanel;       // [kPanel, padded]
  float* weights = values + kPanel * s.padded;       // [kKeys, kPanel]
  float *most = weights + kKeys * kPanel, *total = most + kPanel, *decay = total + kPanel;
  float *position = decay + kPanel, *query = position + kPanel, *copies = query + s.padded;
  WideBlock wide;
  std::fill_n(queries, 2 * s.padded * kPanel, 0.0f);
  auto head = [&](int lane) {  // which query head of the step a lane is
    int64_t nth = item.first + lane;
    return (first_token + nth / s.group) * s.num_heads + item.first_head * s.group + nth % s.group;
  };
  for (int lane = 0; lane < kPanel; ++lane) {
    most[lane] = kMasked;
    total[lane] = 0;
    // A lane too many sees what the last one sees.
    int nth = std::min(lane, item.count - 1);
    position[lane] = start + (item.first + nth) / s.group;
    widen(q + head(nth) * s.head_dim, s.head_dim, query);
    rope.turn(first_token + (item.first + nth) / s.group, s.head_dim, query);
    for (int64_t d = 0; d < s.head_dim; ++d)
      queries[d * kPanel + lane] = query[d] * set.scale;
  }
  int64_t begin = set.window ? std::max<int64_t>(0, int64_t(position[0]) - set.window + 1) : 0;
  int64_t stop = int64_t(position[kPanel - 1]) + 1;

  for (int64_t block_start = begin / kKeys * kKeys; block_start < stop; block_start += kKeys) {
    block.find(s, cache, rows.table + item.row * s.max_pages, item.first_head, block_start, length);
    int64_t keys = std::min<int64_t>(kKeys, stop - block_start);
    wide.widen_block(s, block, keys, copies);
    std::fill_n(weights, keys * kPanel, 0.0f);
    for (int64_t j = 0; j < keys; j += kRows)
      with_rows<kRows>(std::min<int64_t>(kRows, keys - j), [&]<int M>() {
        for (int lane = 0; lane < kPanel; lane += 2 * kLanes)
          tile<M, 2>(
              s.head_dim, [&](int m, int64_t d) { return wide.k[j + m][d]; },
              [&](int64_t d, int v) { return load(queries + d * kPanel + lane + v * kLanes); },
              weights + j * kPanel + lane, kPanel);
      });
    bool all_seen = block_start + keys <= int64_t(position[0]) + 1 &&
                    (!set.window || block_start > stop - 1 - set.window);
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      Vec at = load(position + lane), top = load(most + lane), old = top, added{};
      for (int64_t j = 0; j < keys; ++j) {
        float* score = weights + j * kPanel + lane;
        Vec x = load(score);
        if (set.soft_cap) x = capped(x, set.soft_cap);
        if (!all_seen) {
          float key = block_start + j;
          x = at < key ? splat(kMasked) : x;
          if (set.window) x = at >= key + set.window ? splat(kMasked) : x;
        }
        store(score, x);
        top = larger(x, top);
      }
      for (int64_t j = 0; j < keys; ++j) {
        float* score = weights + j * kPanel + lane;
        Vec x = load(score);
        Vec weight = x <= kMasked ? Vec{} : exp_of_negative(x - top);
        store(score, weight);
        added += weight;
      }
      Vec fade = exp_of_negative(old - top);
      store(decay + lane, fade);
      store(total + lane, load(total + lane) * fade + added);
      store(most + lane, top);
    }
    for (int lane = 0; lane < item.count; ++lane)
      for (int64_t d = 0; d < s.padded; d += kLanes)
        store(values + lane * s.padded + d, load(values + lane * s.padded + d) * decay[lane]);
    for (int lane = 0; lane < item.count; lane += kRows)
      with_rows<kRows>(std::min(kRows, item.count - lane), [&]<int M>() {
        auto weight = [&](int m, int64_t k) { return weights[k * kPanel + lane + m]; };
        int64_t d = 0;
        for (; d + 2 * kLanes <= s.padded; d += 2 * kLanes)
          tile<M, 2>(
              keys, weight, [&](int64_t k, int v) { return load(wide.v[k] + d + v * kLanes); },
              values + lane * s.padded + d, s.padded);
        if (d < s.padded)
          tile<M, 1>(
              keys, weight, [&](int64_t k, int) { return load(wide.v[k] + d); },
              values + lane * s.padded + d, s.padded);
      });
  }
  for (int lane = 0; lane < item.count; ++lane) {
    float* value = values + lane * s.padded;
    for (int64_t d = 0; d < s.padded; d += kLanes) store(value + d, load(value + d) / total[lane]);
    narrow(value, s.head_dim, out + head(lane) * s.head_dim);
  }
}

}  // namespace jaxserve
