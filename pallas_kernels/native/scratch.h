// Memory a thread works in.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace jaxserve {

// Grows, is not cleared, and stays for the next call: new memory would be faulted in anew, page by
// page. Begins at a cache line: a tile whose rows lie across two is loaded at half the speed.
template <typename T>
class Scratch {
 public:
  // What was there before is lost.
  T* get(int64_t count) {
    if (count > size_) {
      constexpr int64_t kLine = 64;
      int64_t bytes = (count * sizeof(T) + kLine - 1) / kLine * kLine;
      data_.reset();
      data_.reset(static_cast<T*>(std::aligned_alloc(kLine, bytes)));
      size_ = data_ ? count : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace jaxserve
