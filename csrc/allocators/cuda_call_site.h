// SPDX-License-Identifier: Apache-2.0
// Tells workspaces of CUDA libraries from tensors, by the caller of the allocator.
//
// Tensors are made by libtorch_cpu (at::detail::empty_generic), on every device. What libtorch_cuda
// and libtorch_cuda_linalg, which torch loads when it needs it, ask for directly are the workspaces
// they lend to cuBLAS, cuDNN, cuSOLVER, cub and the like (up to 65 MiB on an H200, one for each
// thread and stream) - and the few functions that resize a tensor's storage.
#pragma once

#include <atomic>

namespace opacus_memprof {

namespace detail {
struct LibraryRange {
  std::atomic<const char*> begin{nullptr};
  std::atomic<const char*> end{nullptr};
};
extern LibraryRange libtorch_cpu;
bool asks_for_workspaces(const void* return_address);
}  // namespace detail

// Looks up where libtorch_cpu is mapped.
void find_libtorch_cpu();

inline bool is_library_workspace(const void* return_address) {
  const auto* caller = static_cast<const char*>(return_address);
  const bool makes_tensors = caller >= detail::libtorch_cpu.begin.load(std::memory_order_relaxed) &&
                             caller < detail::libtorch_cpu.end.load(std::memory_order_relaxed);
  return !makes_tensors && detail::asks_for_workspaces(return_address);
}

}  // namespace opacus_memprof
