// Work shared between the calling thread and XLA's own pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// Calls body(i) for every i below `count`. The caller takes items like everyone else, and waits only
// for those that somebody has begun: so it is never stuck behind a pool that is busy, and a helper
// that comes late finds nothing to do.
inline void parallel_for(xla::ffi::ThreadPool& pool, int64_t count,
                         const std::function<void(int64_t)>& body) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    int64_t count;
    const std::function<void(int64_t)>* body;  // read only for an item below count: caller waits
  };
  auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->body = &body;
  auto work = [shared] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < shared->count;) {
      (*shared->body)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

}  // namespace jaxserve
