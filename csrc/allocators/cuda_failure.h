// SPDX-License-Identifier: Apache-2.0
// What an allocator and its device say when a request could not be met.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include "core/failures.h"

namespace opacus_memprof {

// Asks for no device memory, and never throws: figures that are not available stay -1.
UpstreamAtFailure upstream_at_failure(c10::cuda::CUDACachingAllocator::CUDAAllocator& upstream,
                                      c10::DeviceIndex device) noexcept;

}  // namespace opacus_memprof
