// SPDX-License-Identifier: Apache-2.0
// For a build without CUDA.
#include "allocators/profiled_allocator.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace opacus_memprof {

void bind_cuda_object(py::module_& module) {
  module.attr("HAS_CUDA") = false;
  module.def("cuda_allocator", &throw_no_cuda);
}

}  // namespace opacus_memprof
