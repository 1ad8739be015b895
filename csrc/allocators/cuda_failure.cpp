// SPDX-License-Identifier: Apache-2.0
#include "allocators/cuda_failure.h"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace opacus_memprof {

namespace cca = c10::cuda::CUDACachingAllocator;

namespace {

// Blocks of a segment are consecutive; blocks that are neither allocated nor active are free.
void add_segment(const cca::SegmentInfo& segment, UpstreamAtFailure& found) {
  std::int64_t free = 0;
  for (const auto& block : segment.blocks) {
    const auto size = static_cast<std::int64_t>(block.size);
    if (block.allocated) {
      found.allocated += size;
    } else if (block.active) {
      found.pending += size;
    } else {
      free += size;
      found.largest_free = std::max(found.largest_free, size);
    }
  }
  const auto total = static_cast<std::int64_t>(segment.total_size);
  found.reserved += total;
  if (segment.is_expandable) {
    found.free_expandable += free;
  } else if (free == total) {
    found.free_segments += total;
  }
}

}  // namespace

UpstreamAtFailure upstream_at_failure(cca::CUDAAllocator& upstream,
                                      c10::DeviceIndex device) noexcept {
  UpstreamAtFailure found;
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {  // the failed call made its device current
    found.device_free = static_cast<std::int64_t>(free);
    found.device_total = static_cast<std::int64_t>(total);
  } else {
    static_cast<void>(cudaGetLastError());
  }
  if (found.device_total > 0) {  // without it the limit is unknown, not 0
    try {
      const auto fraction = upstream.getMemoryFraction(device);
      found.limit = static_cast<std::int64_t>(fraction * static_cast<double>(total));
    } catch (...) {
      // An upstream without a limit.
    }
  }
  try {
    const auto snapshot = upstream.snapshot({0, 0}, false);
    UpstreamAtFailure sums{
        .device_free = found.device_free, .device_total = found.device_total, .limit = found.limit};
    sums.reserved = sums.allocated = sums.pending = sums.largest_free = 0;
    sums.free_segments = sums.free_expandable = 0;
    for (const auto& segment : snapshot.segments) {
      if (segment.device == device) add_segment(segment, sums);
    }
    found = sums;
  } catch (...) {
    // An upstream without snapshots.
  }
  return found;
}

}  // namespace opacus_memprof
