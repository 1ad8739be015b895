// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "allocators/cuda_allocator.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace opacus_memprof {

void bind_cuda_object(py::module_& module) {
  using c10::cuda::CUDACachingAllocator::CUDAAllocator;
  module.attr("HAS_CUDA") = true;
  // Python does not free the pointer, because tensors keep it.
  module.def("cuda_allocator", [] {
    return std::shared_ptr<CUDAAllocator>(delegating_cuda_allocator(), [](CUDAAllocator*) {});
  });
}

}  // namespace opacus_memprof
