// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/device.h"

#include <cuda.h>

#include "virtual_gpu/machine/limits.h"

namespace opacus_memprof::virtual_gpu {

int attribute(const DeviceProperties& device, int index) {
  switch (index) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return kThreadsPerBlock;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return kBlockDepth;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return kGridWidth;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return kGridHeight;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return kSharedMemoryPerBlock;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return kConstantMemory;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return kWarpSize;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return kRegisters;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return device.clock_khz;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
      return kTextureAlignment;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return device.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return device.memory_clock_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return device.memory_bus_bits;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return device.l2_cache;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return device.threads_per_multiprocessor;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return device.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return device.minor;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return device.shared_memory_per_multiprocessor;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return device.shared_memory_per_block_optin;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return device.blocks_per_multiprocessor;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return device.major >= 8 ? kReservedSharedMemory : 0;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return kCopyEngines;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return 1;
    default:
      return 0;
  }
}

}  // namespace opacus_memprof::virtual_gpu
