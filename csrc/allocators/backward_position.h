// SPDX-License-Identifier: Apache-2.0
// Asks autograd for a thread's position in a backward pass, and for the module whose forward made
// the running node.
//
// Autograd numbers the nodes that a thread makes. The range of numbers that a module's forward used
// identifies the module in backward, without touching the graph or keeping it alive.
#pragma once

#include <cstdint>

#include "core/tag_stack.h"

namespace opacus_memprof {

// Returns the position of the calling thread; the reference is valid until the thread's next call.
// Never takes the GIL.
const BackwardPosition& backward_position();

// Returns the graph task that the calling thread is inside, or -1, and notes it in backward_state.
// Cheaper than backward_position(), for callers that need neither module nor op.
int backward_task() noexcept;

// A module's forward: pushes its tag and assigns the sequence numbers made meanwhile to it.
class ModuleScope {
 public:
  [[gnu::hot]] explicit ModuleScope(std::uint16_t module);
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;
  [[gnu::hot]] ~ModuleScope();

  // Called if the forward has raised. The phase then ends with the outermost forward, because no
  // backward follows.
  void fail() noexcept { failed_ = true; }

 private:
  ThreadTags& tags_;
  std::size_t depth_;
  bool recomputes_;
  bool failed_ = false;
};

}  // namespace opacus_memprof
