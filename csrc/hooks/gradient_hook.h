// SPDX-License-Identifier: Apache-2.0
// Follows a parameter's gradient: each time autograd has accumulated into it, its block becomes
// `gradients` of the parameter's module.
//
// This uses autograd's C++ hook, because a Python hook takes microseconds per parameter and needs
// the GIL on autograd's thread. A tensor has room for one C++ hook. Ours calls the existing one.
// The first hook that Python registers later replaces ours, and the gradient must then be followed
// again.
#pragma once

#include <Python.h>

#include <cstdint>

namespace opacus_memprof {

// May be called again, for another module or after a Python hook has replaced ours. Skips objects
// that are not tensors. Called with the GIL held, between backward passes.
void follow_gradient(PyObject* parameter, std::uint16_t module);

// Removes our hook and restores the one that it called.
void unfollow_gradient(PyObject* parameter);

// Returns how many of our hooks were destroyed without unfollow_gradient: with their tensor, or
// replaced by a Python hook.
std::uint64_t gradient_hooks_lost() noexcept;

}  // namespace opacus_memprof
