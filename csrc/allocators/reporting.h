// SPDX-License-Identifier: Apache-2.0
// The steps of every allocator around a delegated allocation. Inline, because this is the hot path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "allocators/backward_position.h"
#include "allocators/program_line.h"
#include "core/recorder.h"

namespace opacus_memprof {

inline std::uint64_t address_of(const void* pointer) noexcept {
  return reinterpret_cast<std::uint64_t>(pointer);
}

// Returns the complete tag of an allocation made now.
[[gnu::always_inline]] inline Tag tag_of_allocation() {
  const ThreadTags& tags = this_thread();
  const Tag top = tags.top();
  if (recorder().writes_events()) {
    // Asking autograd for its node is expensive, and not needed if hooks have set module and op.
    if (top.module == kKeep16 || top.op == kKeep16) return tags.resolve(backward_position());
    return tags.resolve({.task = backward_task()});
  }
  // Counters need only the category, which depends on the task only if no hook has set it.
  return tags.resolve({.task = top.category == kKeep8 ? backward_task() : -1});
}

// Does the same. `workspace`: lent to a library, whatever else is going on.
[[gnu::always_inline]] inline Tag tag_of_allocation(bool workspace) {
  Tag tag = tag_of_allocation();
  if (workspace) tag.category = static_cast<std::uint8_t>(Category::library_workspace);
  return tag;
}

// Makes a line of the user's code the op of a block that has none, if the block is large or nothing
// else tells what it is for.
[[gnu::always_inline]] inline void add_program_line(Tag& tag, std::size_t size) noexcept {
  constexpr std::size_t kLarge = std::size_t{1} << 20U;
  const bool unclaimed = static_cast<Category>(tag.category) == Category::unattributed;
  if (tag.op != 0 || (size < kLarge && !unclaimed) || !recorder().writes_events()) return;
  tag.op = program_line();
}

// Returns the complete tag of a request that has failed.
inline Tag tag_of_failure(std::size_t size) {
  Tag tag = tag_of_allocation();
  add_program_line(tag, size);
  return tag;
}

// Called after upstream has allocated.
inline void report_alloc(const void* pointer, std::size_t size, Device device, std::uint8_t stream,
                         bool workspace = false) {
  Tag tag = tag_of_allocation(workspace);
  add_program_line(tag, size);
  recorder().on_alloc(address_of(pointer), size, device, stream, tag);
}

// Called before upstream frees; returns the result of Recorder::on_free. The analysis distinguishes
// activations from temporaries by the phase of the free; the counters do not need it.
inline PeakId report_free(const void* pointer) noexcept {
  Phase phase = Phase::idle;
  if (recorder().writes_events()) {
    phase = backward_task() >= 0 ? backward_state.phase() : this_thread().phase();
  }
  return recorder().on_free(address_of(pointer), phase);
}

}  // namespace opacus_memprof
