// Arrays of float32 or bfloat16, which of them is known when they come.

#pragma once

#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// Read and written as float32.
struct Numbers {
  void* data;  // null: there are none
  bool is_bfloat16;

  static Numbers of(const xla::ffi::AnyBuffer& buffer) {
    bool empty = buffer.element_count() == 0;
    return {empty ? nullptr : buffer.untyped_data(),
            buffer.element_type() == xla::ffi::BF16};
  }

  float* floats() const { return static_cast<float*>(data); }
  BFloat16* bfloats() const { return static_cast<BFloat16*>(data); }

  Vec load(int64_t i) const {
    return is_bfloat16 ? jaxserve::load(bfloats() + i) : jaxserve::load(floats() + i);
  }
  void store(int64_t i, Vec x) const {
    is_bfloat16 ? jaxserve::store(bfloats() + i, x) : jaxserve::store(floats() + i, x);
  }
  float get(int64_t i) const { return is_bfloat16 ? widen(bfloats()[i]) : floats()[i]; }
  void set(int64_t i, float x) const {
    is_bfloat16 ? narrow(x, bfloats() + i) : narrow(x, floats() + i);
  }
};

inline bool are_numbers(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_type() == xla::ffi::F32 || buffer.element_type() == xla::ffi::BF16;
}

}  // namespace jaxserve
