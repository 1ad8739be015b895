// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "allocators/cuda_allocator.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace opacus_memprof {

void bind_cuda(py::module_& module) {
  using c10::cuda::CUDACachingAllocator::CUDAAllocator;
  module.attr("HAS_CUDA") = true;
  module.def("cuda_install", [] { cuda_allocator()->install(); });
  module.def("cuda_uninstall", [] { cuda_allocator()->uninstall(); });
  module.def("cuda_installed", [] { return cuda_allocator()->installed(); });
  module.def("cuda_current_name", &cuda_current_name);
  module.def("cuda_refresh", &cuda_refresh, py::arg("device"));
  // torch._C's own type; the pointer is not ours to free, since tensors keep it.
  module.def("cuda_allocator", [] {
    return std::shared_ptr<CUDAAllocator>(delegating_cuda_allocator(), [](CUDAAllocator*) {});
  });
}

}  // namespace opacus_memprof
