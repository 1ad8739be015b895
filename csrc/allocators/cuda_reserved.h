// SPDX-License-Identifier: Apache-2.0
// Tells the recorder how much upstream reserves at most, and in which step and phase.
//
// Upstream counts the maximum, but not when it was reached. It reserves only while it allocates. So
// it is asked before the first allocation of each step and phase: what its maximum has grown by
// since the last time was reserved in the step and phase before.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "allocators/reporting.h"

namespace opacus_memprof {

class ReservedMemory {
 public:
  using Upstream = c10::cuda::CUDACachingAllocator::CUDAAllocator;

  // Called before upstream allocates.
  void note_allocation(Upstream& upstream) {
    const Moment now = this_moment();
    if (now != moment_.load(std::memory_order_relaxed)) [[unlikely]]
      enter(upstream, now);
  }
  // Called before the first block is reported: ignores upstream's maximum until now.
  void begin(Upstream& upstream) noexcept;
  // Includes what was reserved since upstream was last asked.
  void ask(Upstream& upstream) noexcept;
  // Resets upstream's maximum, as the program has asked; the recorder keeps its own.
  void reset_upstream(Upstream& upstream, c10::DeviceIndex device);

 private:
  using Moment = std::uint64_t;  // a step above a phase's byte

  static Moment this_moment() {
    const Tag tag = this_thread().resolve({.task = backward_task()});
    return (Moment{recorder().physical_step()} << 8U) | tag.phase;
  }
  [[gnu::cold, gnu::noinline]] void enter(Upstream& upstream, Moment next) noexcept {
    ask(upstream);
    moment_ = next;
  }

  std::atomic<Moment> moment_{0};
  // Upstream's maxima when it was last asked.
  std::array<std::atomic<std::int64_t>, kMaxDevices> seen_{};
};

}  // namespace opacus_memprof
