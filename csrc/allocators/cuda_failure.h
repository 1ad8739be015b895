// SPDX-License-Identifier: Apache-2.0
// State of an allocator and its device after a failed request.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstddef>

#include "allocators/reporting.h"
#include "core/failures.h"

namespace opacus_memprof {

// Needs no device memory, and never throws: unavailable figures stay -1.
UpstreamAtFailure upstream_at_failure(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream,
                                      c10::DeviceIndex device) noexcept;

// Returns the result of `allocate`. If memory runs out, records the failure and rethrows torch's
// error. Other errors pass unchanged: they come from earlier asynchronous work, such as a kernel,
// and only surface in the allocation.
template <typename Allocate>
auto report_oom_of(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream, std::size_t size,
                   Allocate allocate) -> decltype(allocate()) {
  try {
    return allocate();
  } catch (const c10::OutOfMemoryError&) {
    c10::DeviceIndex device = 0;  // the failed call made its device current
    if (c10::cuda::GetDevice(&device) == cudaSuccess) {
      const std::uint64_t number =
          recorder().on_oom(size, static_cast<Device>(1 + device), tag_of_failure(size));
      recorder().note_upstream_at_failure(number, upstream_at_failure(upstream, device));
    }
    throw;
  }
}

}  // namespace opacus_memprof
