// SPDX-License-Identifier: Apache-2.0
// What every allocator does around a delegated allocation. Inline: this is the hot path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "autograd/backward_position.h"
#include "core/recorder.h"

namespace opacus_memprof {

inline std::uint64_t address_of(const void* pointer) noexcept {
  return reinterpret_cast<std::uint64_t>(pointer);
}

// The whole tag of an allocation made now.
[[gnu::always_inline]] inline Tag tag_of_allocation() {
  const ThreadTags& tags = this_thread();
  const Tag top = tags.top();
  if (recorder().detailed()) {
    // Inside a hook's tags, autograd need not be asked for its node.
    const bool said = top.module != kKeep16 && top.op != kKeep16;
    return said ? tags.resolve({.task = backward_task()}) : tags.resolve(backward_position());
  }
  // The counters need the category alone, and a hook has said it already.
  const bool said = top.category != kKeep8;
  return tags.resolve({.task = said ? -1 : backward_task()});
}

// After upstream has allocated. `workspace`: lent to a library, whatever else is going on.
inline void report_alloc(const void* pointer, std::size_t size, Device device, std::uint8_t stream,
                         bool workspace = false) {
  Tag tag = tag_of_allocation();
  if (workspace) tag.category = static_cast<std::uint8_t>(Category::library_workspace);
  recorder().on_alloc(address_of(pointer), size, device, stream, tag);
}

// Before upstream frees; returns what Recorder::on_free does. What a thread is doing when it frees
// tells the analysis activations from temporaries; the counters do not ask.
inline int report_free(const void* pointer) noexcept {
  Phase phase = Phase::idle;
  if (recorder().detailed()) {
    phase = backward_task() >= 0 ? backward_state.phase() : this_thread().phase();
  }
  return recorder().on_free(address_of(pointer), phase);
}

}  // namespace opacus_memprof
