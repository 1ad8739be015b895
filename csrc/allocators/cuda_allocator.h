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
inline void note_peak_ended_by_free(PeakId ended) noexcept {
  if (ended != kNoPeak) cuda_allocator().note_peak(ended);
}

// What happens to blocks that are reported while nothing is installed: the delegating allocator
// leaves torch's place when the last one is freed, and is put back for one that a call was still
// handing out then. No lock of torch's may be in the way: they take none, and never throw.
void note_free_after_uninstall() noexcept;
void note_alloc_after_uninstall() noexcept;

}  // namespace opacus_memprof
