// SPDX-License-Identifier: Apache-2.0
// Asks autograd where a thread is in a backward pass, and whose forward made the running node.
//
// Autograd numbers the nodes that a thread makes; the range of numbers that a module's forward used
// names the module in backward, without touching the graph or keeping it alive.
#pragma once

#include <cstdint>

#include "core/tag_stack.h"

namespace opacus_memprof {

// Of the calling thread, now. Never takes the GIL.
BackwardPosition backward_position();

// Only whether there is a pass: `task`, without module and op.
BackwardPosition backward_task() noexcept;

// The calling thread is inside a graph task (and says so to backward_state).
bool in_backward() noexcept;

// The length of a module's forward: pushes its tag and gives it the sequence numbers made
// meanwhile.
class ModuleScope {
 public:
  [[gnu::hot]] explicit ModuleScope(std::uint16_t module);
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;
  [[gnu::hot]] ~ModuleScope();

 private:
  ThreadTags& tags_;
  std::size_t depth_;
  int task_;  // the graph task that the forward runs in, if any
};

}  // namespace opacus_memprof
