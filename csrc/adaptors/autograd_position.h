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

// The calling thread is inside a graph task (and says so to backward_state).
bool in_backward() noexcept;

// A module's forward begins: pushes its tag and opens its range of sequence numbers.
void enter_module(std::uint16_t module);
// It ends: unwinds to the module's own frame (an inner forward may have raised) and pops it.
void exit_module(std::uint16_t module);

}  // namespace opacus_memprof
