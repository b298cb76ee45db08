// x [T, in] times a weight whose rows lie in panels: packed once, when it is loaded, where a library
// call would pack it anew each time. RMSNorm before it and what models do right after it (a residual
// added, a gate) happen on the way.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "inputs.h"
#include "numbers.h"
#include "parallel.h"
#include "scratch.h"
#include "tiles.h"
#include "vector.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLine = 64;            // bytes of a cache line
constexpr int64_t kItemBytes = 1 << 15;  // of weights, at least: what is worth handing out
constexpr int64_t kRunBytes = 1 << 20;   // of weights, at most: a thread reads them in one run
constexpr int64_t kInputBytes = 1 << 20;  // of an item: packed inputs stay in the L2 cache

enum Gate : int64_t { kNone, kSilu, kGelu };

// What becomes of the sums.
struct Output {
  Numbers out, residual;  // [T, columns]
  const float* scale;     // of the weight's rows, in whole panels; null: none
  Gate gate;              // of a panel's first half, times its second
  int64_t columns;

  void keep(int64_t row, int64_t panel, float* sums) const {
    int width = gate == kNone ? kPanel : kPanel / 2;
    for (int n = 0; scale && n < kPanel; n += kLanes)
      store(sums + n, load(sums + n) * load(scale + panel * kPanel + n));
    for (int n = 0; gate != kNone && n < width; n += kLanes) {
      Vec x = load(sums + n);
      store(sums + n, (gate == kSilu ? silu(x) : gelu(x)) * load(sums + width + n));
    }
    int64_t first = panel * width, at = row * columns + first;
    int count = std::min<int64_t>(width, columns - first), n = 0;
    for (; n + kLanes <= count; n += kLanes) {
      Vec x = load(sums + n);
      out.store(at + n, residual.data ? x + residual.load(at + n) : x);
    }
    for (; n < count; ++n)
      out.set(at + n, residual.data ? sums[n] + residual.get(at + n) : sums[n]);
  }

  // Of a row of zeros.
  void keep_nothing(int64_t row) const {
    int64_t i = row * columns, end = i + columns;
    for (; i + kLanes <= end; i += kLanes) out.store(i, residual.data ? residual.load(i) : Vec{});
    for (; i < end; ++i) out.set(i, residual.data ? residual.get(i) : 0);
  }
};

// Panels of float32 or int8, [in, kPanel].
template <typename W>
struct PlainPanel {
  const W* weights;
  Vec operator()(int64_t k, int v) const { return load(weights + k * kPanel + v * kLanes); }
};

// Panels of bfloat16 tiles, [ceil(in / 32), parts, 2, 16, 16, 2], for CPUs that have no tiles.
template <int Parts>
struct TilePanel {
  const BFloat16* weights;
  Vec operator()(int64_t k, int v) const {
    using namespace amx;
    int64_t column = v * kLanes;
    const BFloat16* at = weights + (k / kDepth * Parts * 2 + column / kSide) * kTile +
                         k % kDepth / 2 * kDepth + column % kSide * 2;
    Vec x = half(at, k % 2);
    return Parts == 1 ? x : x + half(at + 2 * kTile, k % 2);
  }
  // The first or the second of each pair.
  static Vec half(const BFloat16* pairs, bool second) {
    auto both = unaligned<Lanes<uint32_t>>(pairs);
    return reinterpret_cast<Vec>(second ? both & 0xffff0000u : both << 16);
  }
};

// Packed inputs [begin, end) times one panel; emit(nth, sums) takes each one's columns.
// next: what is likely read after this panel.
template <typename Panel, typename Emit>
void multiply_panel(const float* packed, const Panel& panel, const void* next, int64_t depth,
                    int64_t begin, int64_t end, Emit emit) {
  for (int64_t nth = begin; nth < end; nth += kRows) {
    int rows = std::min<int64_t>(kRows, end - nth);
    const float* inputs = packed + nth * depth;
    // The first two groups of rows fetch what comes next, a cache line a turn: a panel of float32 is
    // two lines deep. The others have it, and touch what they hold anyway.
    int64_t group = (nth - begin) / kRows;
    const char* ahead = group < 2 ? static_cast<const char*>(next) + group * depth * kLine
                                  : reinterpret_cast<const char*>(panel.weights);
    int64_t line = group < 2 ? kLine : 0;
    alignas(64) float sums[kRows * kPanel] = {};
    with_rows<kRows>(rows, [&]<int M>() {
      for (int column = 0; column < kPanel; column += 2 * kLanes)
        tile<M, 2>(
            depth, [&](int m, int64_t k) { return inputs[k * M + m]; },
            [&](int64_t k, int v) {
              if (v == 0) prefetch(ahead + k * line);
              return panel(k, column / kLanes + v);
            },
            sums + column, kPanel);
    });
    for (int m = 0; m < rows; ++m) emit(nth + m, sums + m * kPanel);
  }
}

// As above, widened once for many rows.
template <typename Panel, typename Emit>
void multiply_widened(const float* packed, const Panel& panel, const void* next, int64_t depth,
                      int64_t begin, int64_t end, Emit emit) {
  thread_local Scratch<float> scratch;
  float* wide = scratch.get(depth * kPanel);
  for (int64_t k = 0; k < depth; ++k)
    for (int v = 0; v < kPanel / kLanes; ++v)
      store(wide + k * kPanel + v * kLanes, panel(k, v));
  multiply_panel(packed, PlainPanel<float>{wide}, next, depth, begin, end, emit);
}

// run(panel, next, begin, end, emit) for every panel and block of inputs. next: a panel.
template <typename Run>
void for_panels(ffi::ThreadPool& pool, const Inputs& inputs, const Output& output,
                int64_t num_panels, int64_t panel_bytes, int64_t row_bytes, Run run) {
  int64_t rows = inputs.live.size();
  int64_t block = std::max<int64_t>(1, kInputBytes / row_bytes / 48) * 48;  // whole groups of rows
  int64_t blocks = (rows + block - 1) / block;
  // Memory is fastest read in long runs; several a thread, for they are not equally fast.
  auto in = [&](int64_t bytes) { return std::max<int64_t>(1, bytes / panel_bytes); };
  int64_t share = num_panels / (4 * std::max<int64_t>(1, pool.num_threads()));
  int64_t stride = std::clamp(share, in(kItemBytes), in(kRunBytes));
  int64_t strides = (num_panels + stride - 1) / stride;
  parallel_for(pool, blocks * strides, [&](int64_t item) {
    int64_t begin = item / strides * block, end = std::min(rows, begin + block);
    int64_t first = item % strides * stride;
    for (int64_t panel = first; panel < std::min(num_panels, first + stride); ++panel)
      run(panel, panel + 1, begin, end, [&](int64_t nth, float* sums) {
        output.keep(inputs.live[nth], panel, sums);
      });
  });
}

template <typename Panel, typename W>
void multiply_lanes(ffi::ThreadPool& pool, const Inputs& inputs, const Output& output,
                    const W* panels, int64_t num_panels, int64_t panel_size) {
  const float* packed = inputs.as_groups(pool);
  int64_t depth = inputs.depth;
  auto run = [&](int64_t nth, int64_t next, int64_t begin, int64_t end, auto emit) {
    Panel panel{panels + nth * panel_size};
    const W* ahead = panels + next * panel_size;
    if (!std::is_same_v<W, float> && end - begin > kRows)
      multiply_widened(packed, panel, ahead, depth, begin, end, emit);
    else
      multiply_panel(packed, panel, ahead, depth, begin, end, emit);
  };
  for_panels(pool, inputs, output, num_panels, panel_size * sizeof(W), depth * sizeof(float), run);
}

#if defined(JAXSERVE_AMX)

template <int Parts>
void multiply_amx(ffi::ThreadPool& pool, const Inputs& inputs, const Output& output,
                  const BFloat16* panels, int64_t num_panels, int64_t panel_size) {
  using namespace amx;
  const BFloat16* packed = inputs.as_tiles(pool, Parts);
  int64_t blocks = (inputs.depth + kDepth - 1) / kDepth, row_size = blocks * Parts * kDepth;
  // Nothing is fetched ahead: the CPU's own prefetcher does as well.
  auto run = [&](int64_t panel, int64_t, int64_t begin, int64_t end, auto emit) {
    Tiles tiles;
    const BFloat16* weights = panels + panel * panel_size;
    alignas(64) float sums[2 * kSide * kPanel];
    for (int64_t nth = begin; nth < end; nth += 2 * kSide) {
      const BFloat16* x = packed + nth * row_size;
      int64_t rows = std::min<int64_t>(2 * kSide, end - nth);
      auto multiply = [&]<int Groups>() {
        clear<Groups>();
        accumulate<Parts, Parts, Groups>(x, weights, blocks);
        store_sums<Groups>(sums, kPanel * sizeof(float));
      };
      if (rows > kSide)
        multiply.template operator()<2>();
      else
        multiply.template operator()<1>();
      for (int64_t m = 0; m < rows; ++m) emit(nth + m, sums + m * kPanel);
    }
  };
  for_panels(pool, inputs, output, num_panels, panel_size * sizeof(BFloat16),
             row_size * sizeof(BFloat16), run);
}

#endif

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels,
                  ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> norm, ffi::AnyBuffer residual,
                  float eps, int64_t gate, bool use_amx, ffi::Result<ffi::AnyBuffer> out) {
  if (!are_numbers(x) || !are_numbers(residual) || !are_numbers(*out))
    return ffi::Error::InvalidArgument("inputs and results must be float32 or bfloat16");
  auto shape = panels.dimensions();
  int64_t depth = x.dimensions()[1], num_panels = shape[0];
  int64_t panel_size = num_panels ? panels.element_count() / num_panels : 0;
  auto data = [](const ffi::Buffer<ffi::F32>& buffer) {
    return buffer.element_count() ? buffer.typed_data() : nullptr;
  };
  Inputs inputs{Numbers::of(x), x.dimensions()[0], depth, {data(norm), eps}};
  Output output{Numbers::of(*out), Numbers::of(residual), data(scale), Gate(gate),
                out->dimensions()[1]};
  inputs.find_live();
  for (int64_t row : inputs.zeros) output.keep_nothing(row);
  if (inputs.live.empty()) return ffi::Error::Success();

  bool plain = shape.size() == 3;
  int64_t blocks = (depth + amx::kDepth - 1) / amx::kDepth;
  if (plain ? shape[1] != depth || shape[2] != kPanel
            : shape.size() != 7 || shape[1] != blocks || panel_size % (blocks * 2 * amx::kTile))
    return ffi::Error::InvalidArgument("panels do not fit the input");
  auto with = [&](auto multiply, auto* weights) {
    multiply(pool, inputs, output, weights, num_panels, panel_size);
    return ffi::Error::Success();
  };
  if (plain && panels.element_type() == ffi::F32)
    return with(multiply_lanes<PlainPanel<float>, float>, panels.typed_data<float>());
  if (plain && panels.element_type() == ffi::S8)
    return with(multiply_lanes<PlainPanel<int8_t>, int8_t>, panels.typed_data<int8_t>());
  if (plain || panels.element_type() != ffi::BF16)
    return ffi::Error::InvalidArgument("panels must be float32, int8 or tiles of bfloat16");
  auto* tiles = static_cast<const BFloat16*>(panels.untyped_data());
  bool halves = shape[2] == 2;
#if defined(JAXSERVE_AMX)
  if (use_amx) return halves ? with(multiply_amx<2>, tiles) : with(multiply_amx<1>, tiles);
#endif
  return halves ? with(multiply_lanes<TilePanel<2>, BFloat16>, tiles)
                : with(multiply_lanes<TilePanel<1>, BFloat16>, tiles);
}

}  // namespace
}  // namespace jaxserve

// Whether products may use the matrix units: the CPU has them and the kernel lets us.
extern "C" bool jaxserve_request_amx() {
#if defined(JAXSERVE_AMX)
  return jaxserve::amx::request();
#else
  return false;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear, jaxserve::linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("gate")
                                  .Attr<bool>("use_amx")
                                  .Ret<xla::ffi::AnyBuffer>());
