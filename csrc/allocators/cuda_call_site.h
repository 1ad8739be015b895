// SPDX-License-Identifier: Apache-2.0
// Distinguishes workspaces of CUDA libraries from tensors, by the caller of the allocator.
//
// libtorch_cpu makes tensors (at::detail::empty_generic), on every device. Direct requests of
// libtorch_cuda and libtorch_cuda_linalg, which torch loads on demand, are workspaces that they
// lend to cuBLAS, cuDNN, cuSOLVER, cub and others (up to 65 MiB on an H200, one for each thread and
// stream), and a few functions that resize a tensor's storage.
#pragma once

#include <atomic>
#include <cstdint>

namespace opacus_memprof {

namespace detail {
struct alignas(64) CallSites {
  std::atomic<const char*> libtorch_cpu_begin{nullptr};
  std::atomic<const char*> libtorch_cpu_end{nullptr};
  // The last call site outside of it that was looked up, with the result in the lowest bit.
  std::atomic<std::uint64_t> newest{0};
};
extern CallSites call_sites;
bool asks_for_workspaces(const void* return_address);
}  // namespace detail

// Finds the address range of libtorch_cpu.
void find_libtorch_cpu();

inline bool is_library_workspace(const void* return_address) {
  const auto* caller = static_cast<const char*>(return_address);
  const detail::CallSites& sites = detail::call_sites;
  if (caller >= sites.libtorch_cpu_begin.load(std::memory_order_relaxed) &&
      caller < sites.libtorch_cpu_end.load(std::memory_order_relaxed)) {
    return false;  // it makes tensors
  }
  const std::uint64_t newest = sites.newest.load(std::memory_order_relaxed);
  if (newest >> 1U == reinterpret_cast<std::uint64_t>(return_address)) return (newest & 1U) != 0;
  return detail::asks_for_workspaces(return_address);
}

}  // namespace opacus_memprof
