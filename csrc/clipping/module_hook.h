// SPDX-License-Identifier: Apache-2.0
// The hooks that flash_clip registers on modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace opacus_memprof::clipping {

// Adds the type ModuleHook to the extension. `ModuleHook(method)` is a forward hook or pre-hook
// with kwargs that does the same as `method`, a bound method of FlashClipHooks: `_before_entry`,
// `_after_entry`, `_before_layer` or `_after_layer`. A step calls them hundreds of times, and
// nearly always the answer is found without Python code: for a module inside the running call, and
// for a layer of `LayerHooks.plain` with one input. All other calls are passed to the method.
void add_module_hook(pybind11::module_& module);

// Returns a hash of the shapes and dtypes of a layer's input and output.
std::uint64_t hash_of_shapes(const at::Tensor& input, const at::Tensor& output);

}  // namespace opacus_memprof::clipping
