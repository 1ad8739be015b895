// SPDX-License-Identifier: Apache-2.0
// A lock for critical sections of some tens of nanoseconds: one atomic exchange to lock, a plain
// store to unlock (std::mutex needs a second exchange, on every allocation and every free).
//
// It is a leaf: no function that could take another lock is called while it is held, because torch
// may call the allocator with its own locks or the GIL held. Waiting threads yield, in case the
// holder has lost its processor.
#pragma once

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace opacus_memprof {

class SpinLock {
 public:
  SpinLock() = default;
  SpinLock(const SpinLock&) = delete;
  SpinLock& operator=(const SpinLock&) = delete;

  void lock() noexcept {
    while (held_.exchange(true, std::memory_order_acquire)) [[unlikely]] wait();
  }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

 private:
  [[gnu::cold, gnu::noinline]] void wait() const noexcept {
    constexpr int kSpins = 128;
    for (int spins = 0; held_.load(std::memory_order_relaxed); ++spins) {
      if (spins < kSpins) {
#if defined(__x86_64__)
        _mm_pause();
#endif
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::atomic<bool> held_{false};
};

}  // namespace opacus_memprof
