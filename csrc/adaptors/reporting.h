// SPDX-License-Identifier: Apache-2.0
// What both adaptors do around a delegated allocation. Inline: this is the hot path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptors/autograd_position.h"
#include "core/recorder.h"

namespace opacus_memprof {

inline std::uint64_t address_of(const void* pointer) noexcept {
  return reinterpret_cast<std::uint64_t>(pointer);
}

// After upstream has allocated.
inline void report_alloc(const void* pointer, std::size_t size, Device device, std::uint8_t stream,
                         Tag tag) noexcept {
  recorder().on_alloc(address_of(pointer), size, device, stream, tag);
}

inline Tag tag_of_allocation() { return this_thread().resolve(backward_position()); }

// Before upstream frees.
inline Recorder::Freed report_free(const void* pointer) noexcept {
  const Phase phase = in_backward() ? backward_state.phase() : this_thread().phase();
  return recorder().on_free(address_of(pointer), phase);
}

}  // namespace opacus_memprof
