// SPDX-License-Identifier: Apache-2.0
// The parts of _C's definition that have files of their own; _C.pyi says what each function means.
#pragma once

#include <pybind11/pybind11.h>

namespace opacus_memprof {

void bind_counters(pybind11::module_& module);

// HAS_CUDA, and the function cuda_allocator, which returns an object of a type of torch._C that
// only a build with CUDA knows. One definition a build.
void bind_cuda_object(pybind11::module_& module);

}  // namespace opacus_memprof
