// SPDX-License-Identifier: Apache-2.0
// What only CUDA has, beyond the contract of profiled_allocator.h.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include "allocators/profiled_allocator.h"

namespace opacus_memprof {

// The delegating allocator, for torch.cuda.memory.change_current_allocator. Never destroyed.
c10::cuda::CUDACachingAllocator::CUDAAllocator* delegating_cuda_allocator();

// `ended` is what Recorder::on_free has returned: a free that ended a peak has upstream asked for
// its numbers at that peak.
inline void note_peak_ended_by_free(int ended) noexcept {
  if (ended != Recorder::kNoPeak) cuda_allocator().note_peak(static_cast<Device>(ended));
}

}  // namespace opacus_memprof
