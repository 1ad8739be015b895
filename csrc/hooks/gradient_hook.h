// SPDX-License-Identifier: Apache-2.0
// Follows a parameter's gradient: autograd says when it has accumulated, and the block becomes a
// gradient of the parameter's module.
//
// By autograd's C++ hook: Python's costs microseconds a parameter and takes the GIL on autograd's
// thread. A tensor has room for one C++ hook. Ours calls what is there already; the first hook that
// Python registers later takes its place, so that the gradient must be followed anew.
#pragma once

#include <Python.h>

#include <cstdint>

namespace opacus_memprof {

// Again, for another module or after a hook of Python's has taken the place, is harmless.
// Objects that are no tensors are skipped. Called with the GIL held, between backward passes.
void follow_gradient(PyObject* parameter, std::uint16_t module);

// Leaves the hook that would be there without us.
void unfollow_gradient(PyObject* parameter);

// How many hooks of ours are gone without unfollow_gradient: with their tensor, or replaced.
std::uint64_t gradient_hooks_lost() noexcept;

}  // namespace opacus_memprof
