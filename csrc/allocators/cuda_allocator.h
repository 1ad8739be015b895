// SPDX-License-Identifier: Apache-2.0
// Functions for CUDA only, beyond the contract of profiled_allocator.h.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include "allocators/profiled_allocator.h"

namespace opacus_memprof {

// The delegating allocator, for torch.cuda.memory.change_current_allocator. Never destroyed.
c10::cuda::CUDACachingAllocator::CUDAAllocator* delegating_cuda_allocator();

// `ended` is the result of Recorder::on_free: after a free that ended a peak, upstream is asked for
// its counts at that peak.
inline void note_peak_ended_by_free(PeakId ended) noexcept {
  if (ended != kNoPeak) cuda_allocator().note_peak(ended);
}

// Handles blocks that are reported while nothing is installed. The delegating allocator is removed
// from torch when the last one is freed, and installed again for one that a call was still handing
// out then. These functions take no locks of torch, and never throw.
void note_free_after_uninstall() noexcept;
void note_alloc_after_uninstall() noexcept;

}  // namespace opacus_memprof
