// SPDX-License-Identifier: Apache-2.0
// Parts of _C's definition in separate files; _C.pyi explains each function.
#pragma once

#include <pybind11/pybind11.h>

namespace opacus_memprof {

void bind_counters(pybind11::module_& module);

// HAS_CUDA, and the function cuda_allocator, which returns an object of a type of torch._C that
// exists only in a build with CUDA. Each build has one definition.
void bind_cuda_object(pybind11::module_& module);

}  // namespace opacus_memprof
