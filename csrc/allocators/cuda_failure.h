// SPDX-License-Identifier: Apache-2.0
// What an allocator and its device say when a request could not be met.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstddef>

#include "allocators/reporting.h"
#include "core/failures.h"

namespace opacus_memprof {

// Asks for no device memory, and never throws: figures that are not available stay -1.
UpstreamAtFailure upstream_at_failure(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream,
                                      c10::DeviceIndex device) noexcept;

// Returns what `allocate` returns. If memory runs out, records the failure and rethrows torch's
// error. Other errors pass as they are: they come from earlier asynchronous work, such as a kernel,
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
          recorder().on_oom(size, static_cast<Device>(1 + device), tag_of_allocation());
      recorder().note_upstream_at_failure(number, upstream_at_failure(upstream, device));
    }
    throw;
  }
}

}  // namespace opacus_memprof
