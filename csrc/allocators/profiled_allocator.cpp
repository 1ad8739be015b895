// SPDX-License-Identifier: Apache-2.0
#include "allocators/profiled_allocator.h"

namespace opacus_memprof {

ProfiledAllocator* allocator_of(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return &cpu_allocator();
  return type == c10::DeviceType::CUDA ? &cuda_allocator() : nullptr;
}

std::vector<Recorder::DevicePeak> closed_peaks() {
  for (const auto& peak : recorder().peaks()) {
    const PeakId closed = recorder().close_peak(peak.device);
    if (closed == kNoPeak) continue;
    const auto type = peak.device == 0 ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
    if (auto* allocator = allocator_of(type)) allocator->note_peak(closed);
  }
  cuda_allocator().note_reserved();
  return recorder().peaks();
}

void reset_peaks() noexcept {
  cuda_allocator().note_reserved();  // what was reserved until now is forgotten
  recorder().reset_peaks();
  cuda_allocator().note_reserved();
}

}  // namespace opacus_memprof
