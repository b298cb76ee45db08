// Paged attention with an online softmax. A row's keys are taken in blocks of kKeys from its first,
// whatever the batch: nothing that is summed depends on other rows, pages or chunks.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kKeys = 64;      // of a block
constexpr int kFewHeads = 8;   // up to so many heads of a group a decode takes them one by one
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

struct Item {
  int32_t row, kv_head, first, count;  // which of the row's queries times heads of the group
};

// A block of keys and values as rows of floats: the cache's own memory where it is that, else a copy.
struct Block {
  const float *k[kKeys], *v[kKeys];
  std::vector<float> copies;
};

template <typename C>
void read_block(const Shape& s, const Cache<C>& cache, const int32_t* pages, int64_t kv_head,
                int64_t first, int64_t stop, Block& block) {
  bool direct = std::is_same_v<C, float> && s.head_dim == s.padded;
  int64_t size = kKeys * s.padded, token_stride = s.num_kv_heads * s.head_dim;
  float *k_copy = block.copies.data(), *v_copy = k_copy + size;
  const float* nothing = v_copy + size;  // zeros
  int64_t keys = std::min<int64_t>(kKeys, stop - first);
  for (int64_t j = keys; j < kKeys; ++j) block.k[j] = block.v[j] = nothing;
  int64_t nth = first / s.page_size, offset = first % s.page_size;
  for (int64_t j = 0; j < keys; ++nth, offset = 0) {
    int64_t page = std::clamp<int64_t>(pages[nth], 0, s.num_pages - 1);
    int64_t place = (page * s.page_size + offset) * s.num_kv_heads + kv_head;
    int64_t end = std::min(keys, j + s.page_size - offset);
    const C *k = cache.k + place * s.head_dim, *v = cache.v + place * s.head_dim;
    for (; j < end; ++j, k += token_stride, v += token_stride, place += s.num_kv_heads) {
      if constexpr (std::is_same_v<C, float>) {
        if (direct) {
          block.k[j] = k;
          block.v[j] = v;
          continue;
        }
      }
      float k_scale = cache.k_scale ? cache.k_scale[place] : 1;
      float v_scale = cache.v_scale ? cache.v_scale[place] : 1;
      for (int64_t d = 0; d < s.head_dim; ++d) {
        k_copy[j * s.padded + d] = widen(k[d]) * k_scale;
        v_copy[j * s.padded + d] = widen(v[d]) * v_scale;
      }
      block.k[j] = k_copy + j * s.padded;
      block.v[j] = v_copy + j * s.padded;
    }
  }
}

inline Vec capped(Vec x, float cap) {
  // cap * tanh(x / cap), from e^(-2|x|/cap)
  Vec size = (x < 0 ? -x : x) * (-2.0f / cap);
  Vec e = exp_of_negative(size);
  Vec y = cap * (1.0f - e) / (1.0f + e);
  return x < 0 ? -y : y;
}

// One token of a row: its heads one by one, lanes along the head dim, then along the keys.
template <typename C, typename Q>
void decode(const Shape& s, const Settings& set, const Cache<C>& cache, const Rows& rows,
            const Item& item, const Q* q, Q* out, std::vector<float>& scratch, Block& block) {
  int64_t length = rows.kv_len[item.row], token = rows.row_start[item.row];
  int64_t begin = set.window ? std::max<int64_t>(0, length - set.window) : 0;
  int group = s.group;
  float* queries = scratch.data();                 // [group, padded]
  float* values = queries + group * s.padded;      // [group, padded]
  float* weights = values + group * s.padded;      // [group, kKeys]
  float most[kFewHeads], total[kFewHeads];
  const Q* from = q + (token * s.num_heads + item.kv_head * group) * s.head_dim;
  for (int g = 0; g < group; ++g) {
    std::fill_n(queries + g * s.padded, s.padded, 0.0f);
    for (int64_t d = 0; d < s.head_dim; ++d)
      queries[g * s.padded + d] = widen(from[g * s.head_dim + d]) * set.scale;
    most[g] = kMasked;
    total[g] = 0;
  }
  std::fill_n(values, group * s.padded, 0.0f);

  for (int64_t first = begin / kKeys * kKeys; first < length; first += kKeys) {
    read_block(s, cache, rows.table + item.row * s.max_pages, item.kv_head, first, length, block);
    int64_t from_key = std::max<int64_t>(0, begin - first);
    int64_t to_key = std::min<int64_t>(kKeys, length - first);
    for (int g = 0; g < group; ++g) {
      float* score = weights + g * kKeys;
      const float* query = queries + g * s.padded;
      for (int j = 0; j < to_key; j += 4) {
        Vec acc[4] = {};
        for (int64_t d = 0; d < s.padded; d += kLanes) {
          Vec x = load(query + d);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) acc[i] += x * load(block.k[j + i] + d);
        }
        sum(acc, score + j);
      }
      for (int j = 0; j < kKeys; j += kLanes)
        if (set.soft_cap) store(score + j, capped(load(score + j), set.soft_cap));
      for (int j = 0; j < from_key; ++j) score[j] = kMasked;
      for (int j = to_key; j < kKeys; ++j) score[j] = kMasked;
      Vec top = splat(most[g]);
      for (int j = 0; j < kKeys; j += kLanes) top = larger(load(score + j), top);
      float now = largest(top);
      Vec added{};
      for (int j = 0; j < kKeys; j += kLanes) {
        Vec x = load(score + j);
        Vec weight = x <= kMasked ? Vec{} : exp_of_negative(x - now);
        store(score + j, weight);
        added += weight;
      }
      float decay = exp_of_negative(splat(most[g] - now))[0];
      total[g] = total[g] * decay + sum(added);
      most[g] = now;
      for (int64_t d = 0; d < s.padded; d += kLanes)
        store(values + g * s.padded + d, load(values + g * s.padded + d) * decay);
    }
    with_rows<kFewHeads>(group, [&]<int M>() {
      auto weight = [&](int m, int64_t k) { return weights[m * kKeys + k]; };
      int64_t d = 0;
      for (; d + 2 * kLanes <= s.padded; d += 2 * kLanes)
        tile<M, 2>(
            to_key, weight, [&](int64_t k, int v) { return load(block.v[k] + d + v * kLanes); },
            values + d, s.padded);
      if (d < s.padded)
        tile<M, 1>(
            to_key, weight, [&](int64_t k, int) { return load(block.v[k] + d); }, values + d,
            s.padded);
    });
  }
  Q* to = out + (token * s.num_heads + item.kv_head * group) * s.head_dim;
  for (int g = 0; g < group; ++g)
    for (int64_t d = 0; d < s.head_dim; ++d)
      narrow(values[g * s.padded + d] / total[g], to + g * s.head_dim + d);
}

// A panel of queries times heads, one a lane: scores are keys by lanes, so a softmax needs nothing
// across lanes, and its weights are what the product with the values reads, untransposed.
template <typename C, typename Q>
void prefill(const Shape& s, const Settings& set, const Cache<C>& cache, const Rows& rows,
             const Item& item, const Q* q, Q* out, std::vector<float>& scratch, Block& block) {
  int64_t first_token = rows.row_start[item.row];
  int64_t length = rows.kv_len[item.row];
  int64_t start = length - (rows.row_start[item.row + 1] - first_token);
  float* queries = scratch.data();                   // [padded, kPanel]
  float* values = queries + s.padded * kPanel;       // [kPanel, padded]
  float* weights = values + kPanel * s.padded;       // [kKeys, kPanel]
  float *most = weights + kKeys * kPanel, *total = most + kPanel, *decay = total + kPanel;
  float* position = decay + kPanel;
  std::fill_n(queries, 2 * s.padded * kPanel, 0.0f);
  auto head = [&](int lane) {  // which query head of the step a lane is
    int64_t nth = item.first + lane;
    return (first_token + nth / s.group) * s.num_heads + item.kv_head * s.group + nth % s.group;
  };
  for (int lane = 0; lane < kPanel; ++lane) {
    most[lane] = kMasked;
    total[lane] = 0;
    // A lane too many sees what the last one sees.
    int nth = std::min(lane, item.count - 1);
    position[lane] = start + (item.first + nth) / s.group;
    const Q* from = q + head(nth) * s.head_dim;
    for (int64_t d = 0; d < s.head_dim; ++d)
      queries[d * kPanel + lane] = widen(from[d]) * set.scale;
  }
  int64_t begin = set.window ? std::max<int64_t>(0, int64_t(position[0]) - set.window + 1) : 0;
  int64_t stop = int64_t(position[kPanel - 1]) + 1;

  for (int64_t block_start = begin / kKeys * kKeys; block_start < stop; block_start += kKeys) {
    read_block(s, cache, rows.table + item.row * s.max_pages, item.kv_head, block_start, length,
               block);
    int64_t keys = std::min<int64_t>(kKeys, stop - block_start);
    std::fill_n(weights, keys * kPanel, 0.0f);
    for (int64_t j = 0; j < keys; j += kRows)
      with_rows<kRows>(std::min<int64_t>(kRows, keys - j), [&]<int M>() {
        for (int lane = 0; lane < kPanel; lane += 2 * kLanes)
          tile<M, 2>(
              s.head_dim, [&](int m, int64_t d) { return block.k[j + m][d]; },
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
              keys, weight, [&](int64_t k, int v) { return load(block.v[k] + d + v * kLanes); },
              values + lane * s.padded + d, s.padded);
        if (d < s.padded)
          tile<M, 1>(
              keys, weight, [&](int64_t k, int) { return load(block.v[k] + d); },
              values + lane * s.padded + d, s.padded);
      });
  }
  for (int lane = 0; lane < item.count; ++lane)
    for (int64_t d = 0; d < s.head_dim; ++d)
      narrow(values[lane * s.padded + d] / total[lane], out + head(lane) * s.head_dim + d);
}

template <typename C, typename Q>
ffi::Error attend(ffi::ThreadPool& pool, const Shape& s, const Settings& set,
                  const Cache<C>& cache, const Rows& rows, int64_t num_rows, int64_t num_tokens,
                  const Q* q, Q* out) {
  std::vector<Item> items;
  for (int32_t row = 0; row < num_rows; ++row) {
    int64_t count = (rows.row_start[row + 1] - rows.row_start[row]) * s.group;
    if (count <= 0 || rows.kv_len[row] <= 0) continue;
    for (int32_t head = 0; head < s.num_kv_heads; ++head)
      for (int64_t first = 0; first < count; first += kPanel)
        items.push_back({row, head, int32_t(first), int32_t(std::min<int64_t>(kPanel, count - first))});
  }
  int64_t width = s.num_heads * s.head_dim, used = rows.row_start[num_rows];
  std::fill_n(reinterpret_cast<char*>(out + used * width), (num_tokens - used) * width * sizeof(Q), 0);
  parallel_for(pool, items.size(), [&](int64_t i) {
    thread_local std::vector<float> scratch;
    thread_local Block block;
    scratch.resize(2 * kPanel * s.padded + (kKeys + 4) * kPanel);
    if (block.copies.size() != size_t((2 * kKeys + 1) * s.padded))
      block.copies.assign((2 * kKeys + 1) * s.padded, 0.0f);
    const Item& item = items[i];
    bool one = rows.row_start[item.row + 1] - rows.row_start[item.row] == 1;
    if (one && s.group <= kFewHeads)
      decode(s, set, cache, rows, item, q, out, scratch, block);
    else
      prefill(s, set, cache, rows, item, q, out, scratch, block);
  });
  return ffi::Error::Success();
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                           ffi::AnyBuffer v, ffi::Buffer<ffi::F32> k_scale,
                           ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::S32> table,
                           ffi::Buffer<ffi::S32> row_start, ffi::Buffer<ffi::S32> kv_len,
                           float scale, int64_t window, float soft_cap,
                           ffi::Result<ffi::AnyBuffer> out) {
  auto pages = k.dimensions(), queries = q.dimensions();
  Shape s{};
  s.num_heads = queries[1], s.head_dim = queries[2];
  s.num_pages = pages[0], s.page_size = pages[1], s.num_kv_heads = pages[2];
  s.max_pages = table.dimensions()[1];
  s.group = s.num_heads / s.num_kv_heads;
  s.padded = (s.head_dim + kLanes - 1) / kLanes * kLanes;
  Settings set{scale, window, soft_cap};
  Rows rows{table.typed_data(), row_start.typed_data(), kv_len.typed_data()};
  auto run = [&](auto element) {
    using Q = decltype(element);
    auto with = [&](auto cache) {
      return attend(pool, s, set, cache, rows, kv_len.dimensions()[0], queries[0],
                    static_cast<const Q*>(q.untyped_data()), static_cast<Q*>(out->untyped_data()));
    };
    if (k.element_type() == ffi::S8)
      return with(Cache<int8_t>{k.typed_data<int8_t>(), v.typed_data<int8_t>(),
                                k_scale.typed_data(), v_scale.typed_data()});
    return with(Cache<Q>{static_cast<const Q*>(k.untyped_data()),
                         static_cast<const Q*>(v.untyped_data()), nullptr, nullptr});
  };
  if (k.element_type() != ffi::S8 && k.element_type() != q.element_type())
    return ffi::Error::InvalidArgument("pages must be of the queries' dtype, or int8");
  switch (q.element_type()) {
    case ffi::F32:
      return run(float{});
    case ffi::BF16:
      return run(BFloat16{});
    case ffi::F16:
      return run(Float16{});
    default:
      return ffi::Error::InvalidArgument("queries must be float32, bfloat16 or float16");
  }
}

// Copies each token's keys and values to its slot; the pages are the results' own buffers.
ffi::Error write_kv(ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slots,
                    ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> k_pages,
                    ffi::Result<ffi::AnyBuffer> v_pages) {
  auto shape = k_pages->dimensions();
  int64_t places = shape[0] * shape[1], tokens = slots.element_count();
  if (tokens == 0) return ffi::Error::Success();
  int64_t bytes = k.size_bytes() / tokens;
  auto copy = [&](const ffi::AnyBuffer& from, void* pages) {
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t slot = slots.typed_data()[t];
      if (slot < 0 || slot >= places) continue;
      std::memcpy(static_cast<char*>(pages) + slot * bytes,
                  static_cast<const char*>(from.untyped_data()) + t * bytes, bytes);
    }
  };
  copy(k, k_pages->untyped_data());
  copy(v, v_pages->untyped_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention, jaxserve::paged_attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write_kv, jaxserve::write_kv,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
