// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's allocator in a build without CUDA.
#include "allocators/profiled_allocator.h"

namespace opacus_memprof {

ProfiledAllocator* cuda_allocator() { return nullptr; }

}  // namespace opacus_memprof
