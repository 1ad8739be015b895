// SPDX-License-Identifier: Apache-2.0
// What a virtual GPU is: its properties, as CUDA reports them.
#pragma once

#include <cstdint>

namespace opacus_memprof::virtual_gpu {

// Filled by opacus_memprof/virtual_gpu/devices.py, which has the same fields in the same order and
// names the source of each figure. Bytes unless the name says otherwise.
struct DeviceProperties {
  char name[64];
  std::uint64_t total_memory;    // as cudaMemGetInfo reports it
  std::uint64_t context_memory;  // what a CUDA context takes of it before the first allocation
  std::int32_t major;            // compute capability
  std::int32_t minor;
  std::int32_t kernel_architecture;  // of the kernels that torch has for it, as 90
  std::int32_t multiprocessors;
  std::int32_t threads_per_multiprocessor;
  std::int32_t blocks_per_multiprocessor;
  std::int32_t shared_memory_per_block_optin;
  std::int32_t shared_memory_per_multiprocessor;
  std::int32_t l2_cache;
  std::int32_t memory_bus_bits;
  std::int32_t clock_khz;
  std::int32_t memory_clock_khz;
};

// The value of a cudaDeviceAttr or CUdevice_attribute, which share their numbers; 0 if a virtual
// GPU does not have it.
int attribute(const DeviceProperties& device, int index);

}  // namespace opacus_memprof::virtual_gpu
