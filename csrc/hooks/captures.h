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

// Pops the module's newest capture, if it has one. Blocks that nobody else captured return to the
// category that they had before.
void release_captures(std::uint16_t module);

// Decides for each captured block of the module whether Opacus alone holds it: if its storage has
// more holders than captures, it is activation_hooks_shared, else activation_hooks_opacus_only.
void settle_captures(std::uint16_t module);

// As settle_captures, for all modules. `outputs` are about to be returned to the program: a holder
// that is only the program is not autograd, and does not count.
void settle_all_captures(std::span<PyObject* const> outputs);

// Modules, each with its number of captures that are outstanding.
std::vector<std::pair<std::uint16_t, std::size_t>> outstanding_captures();

}  // namespace opacus_memprof
