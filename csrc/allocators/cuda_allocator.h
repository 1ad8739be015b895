// SPDX-License-Identifier: Apache-2.0
// What only CUDA has, beyond the contract of profiled_allocator.h.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <string>

#include "allocators/profiled_allocator.h"

namespace opacus_memprof {

// The delegating allocator, for torch.cuda.memory.change_current_allocator. Never destroyed.
c10::cuda::CUDACachingAllocator::CUDAAllocator* delegating_cuda_allocator();

// `ended` is what Recorder::on_free has returned: a free that ended a peak has upstream asked for
// its numbers at that peak.
inline void note_peak_ended_by_free(int ended) noexcept {
  if (ended != Recorder::kNoPeak) cuda_allocator()->note_peak(static_cast<Device>(ended));
}

// Whoever is the current allocator.
std::string cuda_current_name();

// Asks the wrapped allocator which blocks exist: drops seeded ones that are gone. Returns the bytes
// that were freed but wait for a side stream. Throws c10::Error where it keeps no snapshot.
std::int64_t cuda_refresh(int device);

}  // namespace opacus_memprof
