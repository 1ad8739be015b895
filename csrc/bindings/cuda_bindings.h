// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace opacus_memprof {

// The functions of _C.pyi whose names start with cuda_; HAS_CUDA. One definition a build.
void bind_cuda(pybind11::module_& module);

}  // namespace opacus_memprof
