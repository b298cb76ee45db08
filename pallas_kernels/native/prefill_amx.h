// Attention of many tokens of a row in the matrix units.
//
// Scores come transposed, keys by lanes (a lane: a query and a head of the group), and so do the
// sums of values, head dim by lanes. So the softmax runs down vectors of lanes, and its weights are
// an operand as soon as they are rounded. Only queries and values have to be turned: queries once,
// a block's values once for all panels of an item.

#pragma once

#include "amx.h"
#include "cache.h"
#include "scratch.h"
#include "tiles.h"

namespace jaxserve {

constexpr int kPanels = 4;  // of an item: they share what is packed of a block
constexpr int kItemLanes = kPanels * kPanel;

#if defined(JAXSERVE_AMX)

// What is not exact in bfloat16 comes in two parts, the second what rounding left of the first.
template <typename T>
constexpr int kParts = sizeof(T) == 4 ? 2 : 1;

// A block's keys as tiles [kKeys / 16, blocks of 32 of the head dim, parts, 16 keys, 32], and its
// values as [padded / 16, kKeys / 32, parts, 16 of the head dim, 32 keys].
template <typename C>
struct PackedBlock {
  BFloat16 *k, *v;

  void pack(const Shape& s, const Block<C>& block, int64_t blocks) {
    using namespace amx;
    for (int j = 0; j < kKeys; ++j)
      for (int64_t d = 0; d < blocks * kDepth; d += kSide) {
        int64_t tile = (j / kSide * blocks + d / kDepth) * kParts<C>;
        split<kParts<C>>(d < s.padded ? load(block.k[j] + d) : Vec{},
                         k + tile * kTile + j % kSide * kDepth + d % kDepth);
      }
    for (int64_t d = 0; d < s.padded; d += kSide)
      for (int first = 0; first < kKeys; first += kDepth) {
        Vec rest[kDepth];
        __m512i rows[kSide];
        BFloat16* tile = v + (d / kSide * (kKeys / kDepth) + first / kDepth) * kParts<C> * kTile;
        for (int part = 0; part < kParts<C>; ++part, tile += kTile) {
          for (int p = 0; p < kSide; ++p) {
            Vec* x = rest + 2 * p;
            if (part == 0)
              x[0] = load(block.v[first + 2 * p] + d), x[1] = load(block.v[first + 2 * p + 1] + d);
            rows[p] = pairs(x[0], x[1]);
            if (kParts<C> == 2) x[0] -= even(rows[p]), x[1] -= odd(rows[p]);
          }
          transpose(rows);
          for (int i = 0; i < kSide; ++i) _mm512_store_si512(tile + i * kDepth, rows[i]);
        }
      }
  }
};

// 32 lanes, as far as their row's keys have been seen.
template <int Parts>
struct Panel {
  BFloat16* queries;  // [blocks, parts, 2, 16 pairs, 16 lanes, 2]
  float* values;      // [padded, kPanel]
  alignas(64) float position[kPanel], most[kPanel], total[kPanel];

  // query(lane) [blocks * 32], until the next one is asked for.
  template <typename Query>
  void begin(int64_t padded, int64_t blocks, BFloat16* rows, Query query) {
    using namespace amx;
    std::fill_n(values, padded * kPanel, 0.0f);
    std::fill_n(most, kPanel, kMasked);
    std::fill_n(total, kPanel, 0.0f);
    for (int side = 0; side < 2; ++side) {
      for (int i = 0; i < kSide; ++i) {  // rows: [parts, blocks, 16, 32]
        const float* x = query(side * kSide + i);
        for (int64_t d = 0; d < blocks * kDepth; d += kSide)
          split<Parts>(load(x + d), rows + (d / kDepth * kSide + i) * kDepth + d % kDepth,
                       blocks * kTile);
      }
      for (int64_t block = 0; block < blocks; ++block)
        for (int part = 0; part < Parts; ++part) {
          __m512i turned[kSide];
          const BFloat16* from = rows + (part * blocks + block) * kTile;
          for (int i = 0; i < kSide; ++i) turned[i] = _mm512_load_si512(from + i * kDepth);
          transpose(turned);
          BFloat16* to = queries + ((block * Parts + part) * 2 + side) * kTile;
          for (int p = 0; p < kSide; ++p) _mm512_store_si512(to + p * kDepth, turned[p]);
        }
    }
  }

  // The block of keys from `first`. weights: [kKeys / 32, parts, 2, 16 pairs, 16 lanes, 2].
  template <typename C>
  void add(const Shape& s, const Settings& set, const Block<C>& block, const PackedBlock<C>& packed,
           int64_t blocks, int64_t first, float* scores, BFloat16* weights) {
    using namespace amx;
    constexpr int kBytes = kPanel * sizeof(float);
    for (int key = 0; key < kKeys; key += 2 * kSide) {
      clear<2>();
      accumulate<kParts<C>, Parts, 2>(packed.k + key / kSide * blocks * kParts<C> * kTile, queries,
                                      blocks);
      store_sums<2>(scores + key * kPanel, kBytes);
    }
    for (int side = 0; side < 2; ++side) {
      Vec fade = soften(set, block, first, side, scores, weights);
      bool fades = false;
      for (int i = 0; i < kLanes; ++i) fades |= fade[i] != 1;
      for (int64_t d = 0; fades && d < s.padded; ++d) {
        float* value = values + d * kPanel + side * kSide;
        store(value, load(value) * fade);
      }
    }
    constexpr int64_t kTurned = kKeys / kDepth * kParts<C> * kTile;  // of 16 of the head dim
    for (int64_t d = 0; d < s.padded; d += 2 * kSide) {
      const BFloat16* turned = packed.v + d / kSide * kTurned;
      auto with = [&]<int Groups>() {
        load_sums<Groups>(values + d * kPanel, kBytes);
        accumulate<kParts<C>, Parts, Groups>(turned, weights, kKeys / kDepth);
        store_sums<Groups>(values + d * kPanel, kBytes);
      };
      if (d + kSide < s.padded)
        with.template operator()<2>();
      else
        with.template operator()<1>();
    }
  }

  // give(lane, d, x): its values from d on. Called for 16 lanes and 16 of the head dim at a time.
  template <typename Give>
  void end(int64_t padded, Give give) const {
    for (int side = 0; side < 2; ++side)
      for (int64_t d = 0; d < padded; d += amx::kSide) {
        __m512i rows[amx::kSide];
        for (int i = 0; i < amx::kSide; ++i)
          rows[i] = _mm512_loadu_si512(values + (d + i) * kPanel + side * amx::kSide);
        amx::transpose(rows);
        for (int i = 0; i < amx::kSide; ++i) {
          int lane = side * amx::kSide + i;
          give(lane, d, reinterpret_cast<Vec>(rows[i]) / total[lane]);
        }
      }
  }

 private:
  // The scores of 16 lanes become weights; returns by how much what was summed before fades.
  template <typename C>
  Vec soften(const Settings& set, const Block<C>& block, int64_t first, int side, float* scores,
             BFloat16* weights) {
    using namespace amx;
    constexpr bool kScaled = std::is_same_v<C, int8_t>;
    int lane = side * kSide;
    Vec at = load(position + lane), old = load(most + lane), top = old, added{};
    // Lanes are in the order of their positions.
    bool all_seen = first + kKeys <= int64_t(position[lane]) + 1 &&
                    (!set.window || first > int64_t(position[lane + kSide - 1]) - set.window);
    for (int j = 0; j < kKeys; ++j) {
      float* score = scores + j * kPanel + lane;
      Vec x = load(score) * (kScaled ? set.scale * block.k_scale[j] : set.scale);
      if (set.soft_cap) x = capped(x, set.soft_cap);
      if (!all_seen) {
        float key = first + j;
        x = at < key ? splat(kMasked) : x;
        if (set.window) x = at >= key + set.window ? splat(kMasked) : x;
      }
      store(score, x);
      top = larger(x, top);
    }
    for (int j = 0; j < kKeys; j += 2) {
      Vec pair[2];
      for (int i = 0; i < 2; ++i) {
        Vec x = load(scores + (j + i) * kPanel + lane);
        pair[i] = x <= kMasked ? Vec{} : exp_of_negative(x - top);
        added += pair[i];
        if (kScaled) pair[i] *= block.v_scale[j + i];
      }
      BFloat16* to = weights + (j / kDepth * Parts * 2 + side) * kTile + j % kDepth / 2 * kDepth;
      __m512i high = pairs(pair[0], pair[1]);
      _mm512_store_si512(to, high);
      if (Parts == 2)
        _mm512_store_si512(to + 2 * kTile, pairs(pair[0] - even(high), pair[1] - odd(high)));
    }
    Vec fade = exp_of_negative(old - top);
    store(total + lane, load(total + lane) * fade + added);
    store(most + lane, top);
    return fade;
  }
};

template <typename C, typename Q>
void prefill_amx(const Shape& s, const Settings& set, const Cache<C>& cache, const Rows& rows,
                 const Rope& rope, const Item& item, const Q* q, Q* out, Block<C>& block) {
  using namespace amx;
  constexpr int kQ = kParts<Q>;
  thread_local Scratch<BFloat16> tiles;
  thread_local Scratch<float> floats;
  int64_t blocks = (s.head_dim + kDepth - 1) / kDepth, wide = blocks * kDepth;
  int64_t first_token = rows.row_start[item.row], length = rows.kv_len[item.row];
  int64_t start = length - (rows.row_start[item.row + 1] - first_token);
  int num_panels = (item.count + kPanel - 1) / kPanel;

  int64_t query_size = blocks * kQ * 2 * kTile, value_size = s.padded * kPanel;
  BFloat16* next = tiles.get(kPanels * query_size + blocks * kQ * kTile + kKeys / kDepth * kQ * 2 * kTile +
                             kKeys * (wide + s.padded) * kParts<C>);
  auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
  float* values = floats.get(kPanels * value_size + kKeys * kPanel + kSide * s.padded + wide);
  float* scores = values + kPanels * value_size;
  float *results = scores + kKeys * kPanel, *query = results + kSide * s.padded;

  auto nth = [&](int panel, int lane) {  // a lane too many sees what the last one sees
    return item.first + std::min(panel * kPanel + lane, item.count - 1);
  };
  auto head = [&](int nth) {  // which query head of the step
    return (first_token + nth / s.group) * s.num_heads + item.first_head * s.group + nth % s.group;
  };
  Panel<kQ> panels[kPanels];
  BFloat16* turning = take(blocks * kQ * kTile);
  std::fill_n(query, wide, 0.0f);
  for (int p = 0; p < num_panels; ++p) {
    panels[p].queries = take(query_size);
    panels[p].values = values + p * value_size;
    for (int lane = 0; lane < kPanel; ++lane)
      panels[p].position[lane] = start + nth(p, lane) / s.group;
    panels[p].begin(s.padded, blocks, turning, [&](int lane) {
      widen(q + head(nth(p, lane)) * s.head_dim, s.head_dim, query);
      rope.turn(first_token + nth(p, lane) / s.group, s.head_dim, query);
      return query;
    });
  }
  BFloat16* weights = take(kKeys / kDepth * kQ * 2 * kTile);
  PackedBlock<C> packed{take(kKeys * wide * kParts<C>), take(kKeys * s.padded * kParts<C>)};

  auto first_key = [&](int p) {
    return set.window ? std::max<int64_t>(0, int64_t(panels[p].position[0]) - set.window + 1) : 0;
  };
  auto stop_key = [&](int p) { return int64_t(panels[p].position[kPanel - 1]) + 1; };
  Tiles in_use;
  int64_t stop = stop_key(num_panels - 1);
  for (int64_t first = first_key(0) / kKeys * kKeys; first < stop; first += kKeys) {
    block.find(s, cache, rows.table + item.row * s.max_pages, item.first_head, first, length);
    packed.pack(s, block, blocks);
    for (int p = 0; p < num_panels; ++p)
      if (first < stop_key(p) && first + kKeys > first_key(p))
        panels[p].add(s, set, block, packed, blocks, first, scores, weights);
  }
  for (int p = 0; p < num_panels; ++p)
    panels[p].end(s.padded, [&](int lane, int64_t d, Vec x) {
      store(results + lane % kSide * s.padded + d, x);
      if (d + kSide == s.padded && p * kPanel + lane < item.count)
        narrow(results + lane % kSide * s.padded, s.head_dim, out + head(nth(p, lane)) * s.head_dim);
    });
}

#endif

}  // namespace jaxserve
