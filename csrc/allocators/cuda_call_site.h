// SPDX-License-Identifier: Apache-2.0
// Tells workspaces of CUDA libraries from tensors, by the caller of the allocator.
//
// Tensors are made by libtorch_cpu (at::detail::empty_generic), on every device. What libtorch_cuda
// asks for directly are the workspaces it lends to cuBLAS, cuDNN, cub and the like (up to 65 MiB on
// an H200, one for each thread and stream) - and the few functions that resize a tensor's storage.
#pragma once

#include <atomic>

namespace opacus_memprof {

namespace detail {
struct LibraryRange {
  std::atomic<const char*> begin{nullptr};
  std::atomic<const char*> end{nullptr};
};
extern LibraryRange libtorch_cuda;
bool resizes_storage(const void* return_address);
}  // namespace detail

// Looks up where libtorch_cuda is mapped.
void find_libtorch_cuda();

inline bool is_library_workspace(const void* return_address) {
  const auto* caller = static_cast<const char*>(return_address);
  return caller >= detail::libtorch_cuda.begin.load(std::memory_order_relaxed) &&
         caller < detail::libtorch_cuda.end.load(std::memory_order_relaxed) &&
         !detail::resizes_storage(return_address);
}

}  // namespace opacus_memprof
