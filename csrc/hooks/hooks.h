// SPDX-License-Identifier: Apache-2.0
// The callables in hot Python paths; _C.pyi documents each one.
#pragma once

#include <pybind11/pybind11.h>

namespace opacus_memprof {

// Each adds its type, or its functions, to the module. They throw pybind11::error_already_set.
void add_tagged(pybind11::module_& module);
void add_scoped_forward(pybind11::module_& module);
void add_capture_activations(pybind11::module_& module);
void add_capture_backprops(pybind11::module_& module);
void add_sampler(pybind11::module_& module);
void add_parameter_function(pybind11::module_& module);
void add_functions(pybind11::module_& module);

// Makes samplers call their observer once more for every layer, whichever shapes it has seen.
void forget_observed_shapes() noexcept;

// Called by a Sampler before it returns: the CaptureBackprops that runs on this thread, if any,
// changes to its second tag.
void end_sampling() noexcept;

}  // namespace opacus_memprof
