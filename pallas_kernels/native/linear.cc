// x [T, in] times a weight whose rows lie in panels: packed once, when it is loaded, where a library
// call would pack it anew each time.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTokens = 20 * kRows;  // of one item: their packed inputs stay in the L2 cache

constexpr int64_t kLine = 64;  // bytes of a cache line

// Rows of x that are not all zeros: a step's padding is, and need not be multiplied.
std::vector<int64_t> live_rows(const float* x, int64_t tokens, int64_t depth) {
  std::vector<int64_t> live;
  for (int64_t t = 0; t < tokens; ++t)
    if (std::any_of(x + t * depth, x + (t + 1) * depth, [](float value) { return value != 0; }))
      live.push_back(t);
  return live;
}

// Packed inputs of tokens [begin, end) times one panel; emit(token, sums) takes each one's columns.
// next: what will be read after this panel.
template <typename W, typename Emit>
void multiply_panel(const float* packed, const W* weights, const void* next, int64_t depth,
                    int64_t begin, int64_t end, Emit emit) {
  for (int64_t token = begin; token < end; token += kRows) {
    int rows = std::min<int64_t>(kRows, end - token);
    const float* inputs = packed + token * depth;
    // The first two groups of tokens fetch the panel after this one, a cache line a turn: a panel of
    // float32 is two lines deep. The others have it, and touch what they hold anyway.
    int64_t group = (token - begin) / kRows;
    const char* ahead = group < 2 ? static_cast<const char*>(next) + group * depth * kLine
                                  : reinterpret_cast<const char*>(weights);
    int64_t line = group < 2 ? kLine : 0;
    alignas(64) float sums[kRows * kPanel] = {};
    with_rows<kRows>(rows, [&]<int M>() {
      for (int column = 0; column < kPanel; column += 2 * kLanes)
        tile<M, 2>(
            depth, [&](int m, int64_t k) { return inputs[k * M + m]; },
            [&](int64_t k, int v) {
              if (v == 0) __builtin_prefetch(ahead + k * line, 0, 2);
              return load(weights + k * kPanel + column + v * kLanes);
            },
            sums + column, kPanel);
    });
    for (int m = 0; m < rows; ++m) emit(token + m, sums + m * kPanel);
  }
}

template <typename W>
void multiply(ffi::ThreadPool& pool, const float* x, const W* panels, const float* scale,
              float* out, int64_t num_rows, int64_t depth, int64_t columns) {
  std::vector<int64_t> live = live_rows(x, num_rows, depth);
  int64_t tokens = live.size();
  for (int64_t t = 0, next = 0; t < num_rows; ++t)
    if (next < tokens && live[next] == t)
      ++next;
    else
      std::fill_n(out + t * columns, columns, 0.0f);
  if (tokens == 0) return;

  // Inputs, kRows tokens at a time, depth-major: a tile reads them in order.
  int64_t groups = (tokens + kRows - 1) / kRows;
  std::vector<float> packed(groups * kRows * depth);
  parallel_for(pool, groups, [&](int64_t group) {
    float* to = packed.data() + group * kRows * depth;
    int rows = std::min<int64_t>(kRows, tokens - group * kRows);
    for (int m = 0; m < rows; ++m) {
      const float* from = x + live[group * kRows + m] * depth;
      for (int64_t k = 0; k < depth; ++k) to[k * rows + m] = from[k];
    }
  });

  int64_t num_panels = (columns + kPanel - 1) / kPanel;
  int64_t blocks = (tokens + kTokens - 1) / kTokens;
  // Few tokens: several panels an item, so that an item is worth handing out.
  int64_t stride = std::max<int64_t>(1, 8 / std::min<int64_t>(tokens, 8));
  int64_t strides = (num_panels + stride - 1) / stride;
  parallel_for(pool, blocks * strides, [&](int64_t item) {
    int64_t begin = item / strides * kTokens, end = std::min(tokens, begin + kTokens);
    int64_t first = item % strides * stride;
    for (int64_t panel = first; panel < std::min(num_panels, first + stride); ++panel) {
      const W* weights = panels + panel * depth * kPanel;
      int64_t width = std::min<int64_t>(kPanel, columns - panel * kPanel);
      auto emit = [&](int64_t token, const float* sums) {
        float* to = out + live[token] * columns + panel * kPanel;
        if (scale == nullptr)
          std::copy(sums, sums + width, to);
        else
          for (int64_t n = 0; n < width; ++n) to[n] = sums[n] * scale[panel * kPanel + n];
      };
      if constexpr (!std::is_same_v<W, float>) {
        if (end - begin > kRows) {  // widened once, for many tokens
          thread_local std::vector<float> wide;
          wide.resize(depth * kPanel);
          for (int64_t i = 0; i < depth * kPanel; i += kLanes) store(&wide[i], load(weights + i));
          multiply_panel(packed.data(), wide.data(), weights + depth * kPanel, depth, begin, end,
                         emit);
          continue;
        }
      }
      multiply_panel(packed.data(), weights, weights + depth * kPanel, depth, begin, end, emit);
    }
  });
}

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer panels,
                  ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto shape = panels.dimensions();  // [panels, in, kPanel]
  int64_t tokens = x.dimensions()[0], depth = shape[1], columns = out->dimensions()[1];
  if (shape[2] != kPanel || x.dimensions()[1] != depth)
    return ffi::Error::InvalidArgument("panels do not fit the input");
  auto run = [&](auto* weights, const float* scales) {
    multiply(pool, x.typed_data(), weights, scales, out->typed_data(), tokens, depth, columns);
    return ffi::Error::Success();
  };
  switch (panels.element_type()) {
    case ffi::F32:
      return run(panels.typed_data<float>(), nullptr);
    case ffi::S8:
      return run(panels.typed_data<int8_t>(), scale.typed_data());
    default:
      return ffi::Error::InvalidArgument("panels must be float32 or int8");
  }
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear, jaxserve::linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
