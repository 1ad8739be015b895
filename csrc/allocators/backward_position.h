// SPDX-License-Identifier: Apache-2.0
// Asks autograd where a thread is in a backward pass, and whose forward made the running node.
//
// Autograd numbers the nodes that a thread makes; the range of numbers that a module's forward used
// names the module in backward, without touching the graph or keeping it alive.
#pragma once

#include <cstdint>

#include "core/tag_stack.h"

namespace opacus_memprof {

// Where the calling thread is now; the reference holds until the thread's next call. Never takes
// the GIL.
const BackwardPosition& backward_position();

// The graph task that the calling thread is inside, which backward_state then knows, or -1. Cheaper
// than backward_position(), for callers that need neither module nor op.
int backward_task() noexcept;

// The length of a module's forward: pushes its tag and gives it the sequence numbers made
// meanwhile.
class ModuleScope {
 public:
  [[gnu::hot]] explicit ModuleScope(std::uint16_t module);
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;
  [[gnu::hot]] ~ModuleScope();

  // To be called if the forward has raised: the phase then ends with the outermost forward, because
  // no backward follows.
  void fail() noexcept { failed_ = true; }

 private:
  ThreadTags& tags_;
  std::size_t depth_;
  bool recomputes_;
  bool failed_ = false;
};

}  // namespace opacus_memprof
