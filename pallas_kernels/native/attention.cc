// Paged attention with an online softmax. A row's keys are taken in blocks of kKeys from its first,
// whatever the batch: nothing that is summed depends on other rows, pages or chunks.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cache.h"
#include "decode.h"
#include "parallel.h"
#include "prefill.h"
#include "prefill_amx.h"
#include "vector.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

template <typename C, typename Q>
ffi::Error attend(ffi::ThreadPool& pool, const Shape& s, const Settings& set,
                  const Cache<C>& cache, const Rows& rows, const Rope& rope, int64_t num_rows,
                  int64_t num_tokens, bool use_amx, const Q* q, Q* out) {
  auto tokens_of = [&](int64_t row) { return rows.row_start[row + 1] - rows.row_start[row]; };
  auto decodes = [&](int64_t row) { return tokens_of(row) == 1 && s.group <= kFewHeads; };
  std::vector<int32_t> live;
  int64_t num_decodes = 0;
  for (int32_t row = 0; row < num_rows; ++row) {
    if (tokens_of(row) <= 0 || rows.kv_len[row] <= 0) continue;
    live.push_back(row);
    num_decodes += decodes(row);
  }
  // Few decodes: a head an item, so that there is something for everybody.
  int32_t all = s.num_kv_heads, some = num_decodes >= 2 * pool.num_threads() ? all : 1;
  // float16 has no tiles, in queries or pages.
  bool in_tiles = use_amx && !std::is_same_v<Q, Float16>;
  int32_t lanes = in_tiles ? kItemLanes : kPanel;
  std::vector<Item> items;
  for (int32_t row : live) {
    int32_t count = tokens_of(row) * s.group;
    for (int32_t head = 0; decodes(row) && head < all; head += some)
      items.push_back({row, head, head + some, 0, count});
    for (int32_t head = 0; !decodes(row) && head < all; ++head)
      for (int32_t first = 0; first < count; first += lanes)
        items.push_back({row, head, head + 1, first, std::min(lanes, count - first)});
  }
  int64_t width = s.num_heads * s.head_dim, used = rows.row_start[num_rows];
  std::fill_n(reinterpret_cast<char*>(out + used * width), (num_tokens - used) * width * sizeof(Q), 0);
  parallel_for(pool, items.size(), [&](int64_t i) {
    thread_local std::vector<float> scratch;
    Block<C> block;
    const Item& item = items[i];
    // Threads take items in turn.
    int64_t next = items[std::min<int64_t>(i + pool.num_threads(), items.size() - 1)].row;
    if (decodes(item.row))
      with_rows<kFewHeads>(s.group, [&]<int G>() {
        decode<G>(s, set, cache, rows, rope, item, next, q, out, scratch, block);
      });
    else if (!in_tiles)
      prefill(s, set, cache, rows, rope, item, q, out, scratch, block);
#if defined(JAXSERVE_AMX)
    else if constexpr (!std::is_same_v<Q, Float16>)
      prefill_amx(s, set, cache, rows, rope, item, q, out, block);
#endif
  });
  return ffi::Error::Success();
}

Rope rope_of(const ffi::Buffer<ffi::F32>& cos, const ffi::Buffer<ffi::F32>& sin) {
  return cos.element_count() ? Rope{cos.typed_data(), sin.typed_data()} : Rope{nullptr, nullptr};
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                           ffi::AnyBuffer v, ffi::Buffer<ffi::F32> k_scale,
                           ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::S32> table,
                           ffi::Buffer<ffi::S32> row_start, ffi::Buffer<ffi::S32> kv_len,
                           ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, float scale,
                           int64_t window, float soft_cap, bool use_amx,
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
  Rope rope = rope_of(cos, sin);
  auto run = [&](auto element) {
    using Q = decltype(element);
    auto with = [&](auto cache) {
      return attend(pool, s, set, cache, rows, rope, kv_len.dimensions()[0], queries[0],
                    use_amx, static_cast<const Q*>(q.untyped_data()), static_cast<Q*>(out->untyped_data()));
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

// Each token's keys, turned, and values go to its slot; the pages are the results' own buffers.
template <typename T>
void write_tokens(ffi::ThreadPool& pool, const T* k, const T* v, const ffi::Buffer<ffi::S32>& slots,
                  const Rope& rope, int64_t places, int64_t heads, int64_t head_dim, T* k_pages,
                  T* v_pages) {
  constexpr int64_t kTokens = 32;  // of an item
  int64_t tokens = slots.element_count(), width = heads * head_dim;
  parallel_for(pool, (tokens + kTokens - 1) / kTokens, [&](int64_t item) {
    std::vector<float> key(head_dim);
    for (int64_t t = item * kTokens; t < std::min(tokens, (item + 1) * kTokens); ++t) {
      int64_t slot = slots.typed_data()[t];
      if (slot < 0 || slot >= places) continue;
      std::copy_n(v + t * width, width, v_pages + slot * width);
      if (rope.cos == nullptr) {
        std::copy_n(k + t * width, width, k_pages + slot * width);
        continue;
      }
      for (int64_t at = 0; at < width; at += head_dim) {
        widen(k + t * width + at, head_dim, key.data());
        rope.turn(t, head_dim, key.data());
        narrow(key.data(), head_dim, k_pages + slot * width + at);
      }
    }
  });
}

ffi::Error write_kv(ffi::ThreadPool pool, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> cos,
                    ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer, ffi::AnyBuffer,
                    ffi::Result<ffi::AnyBuffer> k_pages, ffi::Result<ffi::AnyBuffer> v_pages) {
  auto shape = k_pages->dimensions();
  auto run = [&](auto element) {
    using T = decltype(element);
    auto of = [](const ffi::AnyBuffer& buffer) { return static_cast<T*>(buffer.untyped_data()); };
    write_tokens<T>(pool, of(k), of(v), slots, rope_of(cos, sin), shape[0] * shape[1], shape[2],
                    shape[3], of(*k_pages), of(*v_pages));
    return ffi::Error::Success();
  };
  if (k.element_type() != k_pages->element_type())
    return ffi::Error::InvalidArgument("keys must be of the pages' dtype");
  switch (k.element_type()) {
    case ffi::F32:
      return run(float{});
    case ffi::BF16:
      return run(BFloat16{});
    case ffi::F16:
      return run(Float16{});
    default:
      return ffi::Error::InvalidArgument("pages must be float32, bfloat16 or float16");
  }
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
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("use_amx")
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write_kv, jaxserve::write_kv,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
