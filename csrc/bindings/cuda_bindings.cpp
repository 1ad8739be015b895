// SPDX-License-Identifier: Apache-2.0
#include "bindings/cuda_bindings.h"

#include <memory>

#include "adaptors/cuda_adaptor.h"

namespace py = pybind11;

namespace opacus_memprof {

void bind_cuda(py::module_& module) {
  using c10::cuda::CUDACachingAllocator::CUDAAllocator;
  module.attr("HAS_CUDA") = true;
  module.def("cuda_install", [] { cuda_adaptor()->install(); });
  module.def("cuda_uninstall", [] { cuda_adaptor()->uninstall(); });
  module.def("cuda_installed", [] { return cuda_adaptor()->installed(); });
  module.def("cuda_current_name", &cuda_current_name);
  module.def("cuda_refresh", &cuda_refresh, py::arg("device"));
  // torch._C's own type; the pointer is not ours to free, since tensors keep it.
  module.def("cuda_allocator", [] {
    return std::shared_ptr<CUDAAllocator>(cuda_allocator(), [](CUDAAllocator*) {});
  });
}

}  // namespace opacus_memprof
