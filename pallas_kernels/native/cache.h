// The paged cache of one layer, as attention reads it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace jaxserve {

constexpr int kKeys = 64;  // of a block: a row's keys are taken so from its first, whatever the batch
constexpr float kMasked = -1e30f;

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, max_pages, num_pages;
  int64_t group, padded;  // padded: head_dim rounded up to whole vectors
};

struct Settings {
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
};

template <typename C>
struct Cache {
  const C *k, *v;
  const float *k_scale, *v_scale;  // of int8: for each head of each token
};

struct Rows {
  const int32_t *table, *row_start, *kv_len;
};

// What a thread takes at a time: of a row, KV heads [first_head, end_head) of a decode; of a longer
// row one head, and `count` of its queries times heads of the group.
struct Item {
  int32_t row, first_head, end_head, first, count;
};

// Cos and sin of each token, [T, head_dim / 2]. Null: queries and keys are turned already.
struct Rope {
  const float *cos, *sin;

  // x [head_dim] of a token, its halves against each other (Su et al. 2021).
  void turn(int64_t token, int64_t head_dim, float* x) const {
    if (cos == nullptr) return;
    int64_t half = head_dim / 2;
    const float *c = cos + token * half, *s = sin + token * half;
    for (int64_t d = 0; d < half; ++d) {
      float first = x[d], second = x[d + half];
      x[d] = first * c[d] - second * s[d];
      x[d + half] = second * c[d] + first * s[d];
    }
  }
};

// A block of keys and values where they lie; copies where vectors would reach past a head's end.
template <typename C>
struct Block {
  const C *k[kKeys], *v[kKeys];
  float k_scale[kKeys], v_scale[kKeys];  // of int8
  std::vector<C> copies;

  // Keys [first, stop) of a row's head, at most kKeys. Past the last one: zeros.
  void find(const Shape& s, const Cache<C>& cache, const int32_t* pages, int64_t kv_head,
            int64_t first, int64_t stop) {
    int64_t size = (2 * kKeys + 1) * s.padded;
    if (int64_t(copies.size()) != size) copies.assign(size, C{});
    const C* zeros = copies.data() + 2 * kKeys * s.padded;
    int64_t keys = std::min<int64_t>(kKeys, stop - first);
    for (int64_t j = keys; j < kKeys; ++j) k[j] = v[j] = zeros, k_scale[j] = v_scale[j] = 0;
    for_places(s, pages, first, keys, [&](int64_t j, int64_t place) {
      place = place * s.num_kv_heads + kv_head;
      k[j] = cache.k + place * s.head_dim;
      v[j] = cache.v + place * s.head_dim;
      if constexpr (std::is_same_v<C, int8_t>) {
        k_scale[j] = cache.k_scale[place];
        v_scale[j] = cache.v_scale[place];
      }
    });
    if (s.head_dim == s.padded) return;
    for (int64_t j = 0; j < keys; ++j) {
      C *k_copy = &copies[2 * j * s.padded], *v_copy = k_copy + s.padded;
      std::copy_n(k[j], s.head_dim, k_copy);
      std::copy_n(v[j], s.head_dim, v_copy);
      k[j] = k_copy, v[j] = v_copy;
    }
  }

 private:
  // visit(j, place) for each key [first, first + keys) of a row: its place in [pages, page_size].
  template <typename Visit>
  static void for_places(const Shape& s, const int32_t* pages, int64_t first, int64_t keys,
                         Visit visit) {
    int64_t nth = first / s.page_size, offset = first % s.page_size;
    for (int64_t j = 0; j < keys; ++nth, offset = 0) {
      int64_t page = std::clamp<int64_t>(pages[nth], 0, s.num_pages - 1);
      int64_t place = page * s.page_size + offset;
      for (int64_t end = std::min(keys, j + s.page_size - offset); j < end;) visit(j++, place++);
    }
  }
};

// Brings all heads of keys [first, stop), at most kKeys, into this core's cache, a few lines of keys
// and values at a time: asked for all at once they would only wait in a queue, and hold up the rest.
template <typename C>
class Ahead {
 public:
  Ahead(const Shape& s, const Cache<C>& cache, const int32_t* pages, int64_t first, int64_t stop)
      : s_(s), cache_(cache), pages_(pages + first / s.page_size) {
    bytes_ = s.num_kv_heads * s.head_dim * sizeof(C);
    left_ = std::min<int64_t>(kKeys, stop - first) * bytes_;
    enter(first % s.page_size);
  }

  void fetch(int lines) {
    for (; lines > 0 && left_ > 0; --lines, at_ += 64, left_ -= 64) {
      if (at_ >= end_) enter(0);
      prefetch(reinterpret_cast<const char*>(cache_.k) + at_);
      prefetch(reinterpret_cast<const char*>(cache_.v) + at_);
    }
  }

 private:
  void enter(int64_t offset) {
    if (left_ <= 0) return;
    int64_t page = std::clamp<int64_t>(*pages_++, 0, s_.num_pages - 1);
    at_ = (page * s_.page_size + offset) * bytes_;
    end_ = (page + 1) * s_.page_size * bytes_;
  }

  const Shape& s_;
  const Cache<C>& cache_;
  const int32_t* pages_;
  int64_t bytes_, left_, at_ = 0, end_ = 0;
};

inline Vec capped(Vec x, float cap) { return cap * tanh(x / cap); }

}  // namespace jaxserve
