// SPDX-License-Identifier: Apache-2.0
// What the CUDA allocator asks of CUDA's runtime and of autograd, without either: one device, and
// no backward pass. The runtime's functions replace libcudart's in libc10_cuda as well.
#include <cuda_runtime_api.h>

#include "allocators/backward_position.h"
#include "allocators/program_line.h"
#include "fake_upstream.h"

bool opacus_memprof::testing::memory_info_fails = false;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int /*device*/) { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (opacus_memprof::testing::memory_info_fails) return cudaErrorUnknown;
  *free = std::size_t{1} << 30U;
  *total = std::size_t{4} << 30U;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

}  // extern "C"

namespace opacus_memprof {

int backward_task() noexcept { return -1; }

const BackwardPosition& backward_position() {
  static constexpr BackwardPosition kOutside;
  return kOutside;
}

std::uint16_t program_line() noexcept { return 0; }

}  // namespace opacus_memprof
