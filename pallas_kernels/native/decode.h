// Attention of one token of a row: the heads of a group together, lanes along the head dim for the
// scores, then along the keys for an online softmax.

#pragma once

#include "cache.h"

namespace jaxserve {

constexpr int kFewHeads = 8;  // of a group: their sums fit the registers

template <int G, typename C>
inline void score_keys(const Shape& s, const Block<C>& block, const float* queries, int64_t keys,
                       float* scores, Ahead<C>& ahead) {
  constexpr int kTogether = 4;
  constexpr int kHeads = G <= 4 ? G : (G + 1) / 2;  // that go at once
  for (int64_t j = 0; j < keys; j += kTogether) {
    ahead.fetch(kTogether);
    for (int g = 0; g < G; g += kHeads) {
      Vec acc[kHeads][kTogether] = {};
      for (int64_t d = 0; d < s.padded; d += kLanes) {
        Vec key[kTogether];
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) key[i] = load(block.k[j + i] + d);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          Vec query = load(queries + std::min(g + h, G - 1) * s.padded + d);
#pragma GCC unroll 4
          for (int i = 0; i < kTogether; ++i) acc[h][i] += query * key[i];
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
        if (g + h < G) sum(acc[h], scores + (g + h) * kKeys + j);
    }
  }
  if constexpr (std::is_same_v<C, int8_t>)
    for (int g = 0; g < G; ++g)
      for (int64_t j = 0; j < kKeys; ++j) scores[g * kKeys + j] *= block.k_scale[j];
}

// The scores of one head become weights; returns by how much what was summed before fades.
inline float soften(const Settings& set, int64_t from_key, int64_t to_key, float* score,
                    float& most, float& total) {
  for (int j = 0; set.soft_cap && j < kKeys; j += kLanes)
    store(score + j, capped(load(score + j), set.soft_cap));
  for (int64_t j = 0; j < from_key; ++j) score[j] = kMasked;
  for (int64_t j = to_key; j < kKeys; ++j) score[j] = kMasked;
  Vec top = splat(most);
  for (int j = 0; j < kKeys; j += kLanes) top = larger(load(score + j), top);
  float now = largest(top);
  Vec added{};
  for (int j = 0; j < kKeys; j += kLanes) {
    Vec x = load(score + j);
    Vec weight = x <= kMasked ? Vec{} : exp_of_negative(x - now);
    store(score + j, weight);
    added += weight;
  }
  float fade = exp_of_negative(splat(most - now))[0];
  total = total * fade + sum(added);
  most = now;
  return fade;
}

// The heads of one group, as far as their row's keys have been seen.
template <int G>
struct Group {
  float *queries, *values;  // [G, padded]
  float most[G], total[G];

  template <typename Q>
  void begin(const Shape& s, const Settings& set, const Rope& rope, int64_t token, const Q* q) {
    std::fill_n(queries, 2 * G * s.padded, 0.0f);
    for (int g = 0; g < G; ++g) {
      float* query = queries + g * s.padded;
      widen(q + g * s.head_dim, s.head_dim, query);
      rope.turn(token, s.head_dim, query);
      for (int64_t d = 0; d < s.padded; d += kLanes) store(query + d, load(query + d) * set.scale);
      most[g] = kMasked;
      total[g] = 0;
    }
  }

  // Keys [from_key, keys) of a block.
  template <typename C>
  void add(const Shape& s, const Settings& set, const Block<C>& block, int64_t from_key,
           int64_t keys, float* weights, Ahead<C>& ahead) {
    score_keys<G>(s, block, queries, keys, weights, ahead);
    for (int g = 0; g < G; ++g) {
      float* weight = weights + g * kKeys;
      float fade = soften(set, from_key, keys, weight, most[g], total[g]);
      for (int64_t d = 0; d < s.padded; d += kLanes)
        store(values + g * s.padded + d, load(values + g * s.padded + d) * fade);
      if constexpr (std::is_same_v<C, int8_t>)
        for (int64_t j = 0; j < kKeys; ++j) weight[j] *= block.v_scale[j];
    }
    auto weight = [&](int g, int64_t j) { return weights[g * kKeys + j]; };
    int64_t d = 0;
    for (; d + 2 * kLanes <= s.padded; d += 2 * kLanes)
      tile<G, 2>(
          keys, weight,
          [&](int64_t j, int v) {
            if (v == 0) ahead.fetch(1);
            return load(block.v[j] + d + v * kLanes);
          },
          values + d, s.padded);
    if (d < s.padded)
      tile<G, 1>(
          keys, weight, [&](int64_t j, int) { return load(block.v[j] + d); }, values + d,
          s.padded);
  }

  template <typename Q>
  void end(const Shape& s, Q* out) const {
    for (int g = 0; g < G; ++g) {
      float* value = values + g * s.padded;
      for (int64_t d = 0; d < s.padded; d += kLanes) store(value + d, load(value + d) / total[g]);
      narrow(value, s.head_dim, out + g * s.head_dim);
    }
  }
};

// The groups of KV heads [first_head, end_head) of a row, block by block: memory is read in order,
// and fetched a block ahead. next: the row whose first block is fetched during the last one.
template <int G, typename C, typename Q>
void decode(const Shape& s, const Settings& set, const Cache<C>& cache, const Rows& rows,
            const Rope& rope, const Item& item, int64_t next, const Q* q, Q* out,
            std::vector<float>& scratch, Block<C>& block) {
  int64_t length = rows.kv_len[item.row], token = rows.row_start[item.row];
  auto first_key = [&](int64_t row) {
    return set.window ? std::max<int64_t>(0, rows.kv_len[row] - set.window) : 0;
  };
  int64_t begin = first_key(item.row);
  const int32_t* pages = rows.table + item.row * s.max_pages;
  int64_t place = token * s.num_heads * s.head_dim, width = G * s.head_dim;
  int64_t heads = item.end_head - item.first_head, state = 2 * G * s.padded;
  scratch.resize(heads * state + G * kKeys);
  thread_local std::vector<Group<G>> groups;
  groups.resize(heads);
  for (int64_t h = 0; h < heads; ++h) {
    float* queries = scratch.data() + h * state;
    groups[h] = {queries, queries + G * s.padded, {}, {}};
    groups[h].begin(s, set, rope, token, q + place + (item.first_head + h) * width);
  }
  for (int64_t first = begin / kKeys * kKeys; first < length; first += kKeys) {
    bool last = first + kKeys >= length;
    int64_t row = last ? next : item.row, at = last ? first_key(next) / kKeys * kKeys : first + kKeys;
    int64_t keys = std::min<int64_t>(kKeys, length - first);
    Ahead<C> ahead(s, cache, rows.table + row * s.max_pages, at, rows.kv_len[row]);
    for (int64_t h = 0; h < heads; ++h) {
      block.find(s, cache, pages, item.first_head + h, first, length);
      groups[h].add(s, set, block, begin - first, keys, scratch.data() + heads * state, ahead);
    }
  }
  for (int64_t h = 0; h < heads; ++h)
    groups[h].end(s, out + place + (item.first_head + h) * width);
}

}  // namespace jaxserve
