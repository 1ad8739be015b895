// SPDX-License-Identifier: Apache-2.0
// The activations that Opacus' forward hook has captured: for each module a stack of captures that
// no backward pass has used yet. All functions are called with the GIL held.
#pragma once

#include <Python.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace opacus_memprof {

// Pushes a capture of these tensors. Their blocks become activation_hooks_shared if they were born
// in forward, or recomputed in backward; other blocks keep their category.
void capture_tensors(std::uint16_t module, std::span<PyObject* const> tensors);

// Pops the module's newest capture, if it has one. Blocks without another capture get their
// previous category back.
void release_captures(std::uint16_t module);

// Decides for each captured block of the module whether Opacus alone holds it. If its storage has
// more holders than captures, it is activation_hooks_shared, otherwise
// activation_hooks_opacus_only.
void settle_captures(std::uint16_t module);

// Does what settle_captures does, for all modules. `outputs` are about to be returned to the
// program: references of the program are not autograd's, and do not count.
void settle_all_captures(std::span<PyObject* const> outputs);

// Returns modules with their numbers of outstanding captures.
std::vector<std::pair<std::uint16_t, std::size_t>> outstanding_captures();

}  // namespace opacus_memprof
