// SPDX-License-Identifier: Apache-2.0
#include "allocators/cuda_reserved.h"

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <optional>

namespace opacus_memprof {

namespace {

struct Reserved {
  std::int64_t now;
  std::int64_t peak;
};

// std::nullopt from an upstream that does not count.
std::optional<Reserved> reserved_on(ReservedMemory::Upstream& upstream,
                                    c10::DeviceIndex device) noexcept {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  try {
    const auto stats = upstream.getDeviceStats(device);
    return Reserved{stats.reserved_bytes[kAll].current, stats.reserved_bytes[kAll].peak};
  } catch (...) {
    return std::nullopt;
  }
}

// 0 for an upstream that has not been used yet. To count the devices then would initialise CUDA,
// after which forked children could not use it.
c10::DeviceIndex devices(ReservedMemory::Upstream& upstream) noexcept {
  try {
    if (!upstream.initialized()) return 0;
  } catch (...) {
    return 0;
  }
  return std::min(c10::cuda::device_count(), static_cast<c10::DeviceIndex>(kMaxDevices - 1));
}

}  // namespace

void ReservedMemory::begin(Upstream& upstream) noexcept {
  moment_ = this_moment();
  for (c10::DeviceIndex index = 0; index < devices(upstream); ++index) {
    const auto reserved = reserved_on(upstream, index);
    seen_[index] = reserved ? reserved->peak : 0;
  }
}

void ReservedMemory::ask(Upstream& upstream) noexcept {
  for (c10::DeviceIndex index = 0; index < devices(upstream); ++index) {
    const auto reserved = reserved_on(upstream, index);
    if (!reserved) continue;
    const bool rose = reserved->peak > seen_[index].exchange(reserved->peak);
    const Moment moment = moment_;
    recorder().note_reserved(static_cast<Device>(1 + index),
                             {.bytes = rose ? reserved->peak : reserved->now,
                              .step = static_cast<std::uint32_t>(moment >> 8U),
                              .phase = static_cast<std::uint8_t>(moment)});
  }
}

void ReservedMemory::reset_upstream(Upstream& upstream, c10::DeviceIndex device) {
  ask(upstream);
  upstream.resetPeakStats(device);
  if (const auto reserved = reserved_on(upstream, device)) seen_[device] = reserved->peak;
}

}  // namespace opacus_memprof
