// SPDX-License-Identifier: Apache-2.0
// libcudart: memory in the order of a stream (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/machine/pool.h"
#include "virtual_gpu/runtime/status.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::current_device;
using virtual_gpu::fail;
using virtual_gpu::machine;
using virtual_gpu::Pool;
using virtual_gpu::valid_device;

namespace {

// The default pool of each device first, then the pools that the program made; never
// destroyed, nor is the machine.
struct Pools {
  std::mutex mutex;
  std::deque<Pool> all;

  Pools() {
    for (int device = 0; device < static_cast<int>(machine().devices.size()); ++device) {
      all.emplace_back(machine().memory, device);
    }
  }
};

Pools& pools() {
  static auto* const only = new Pools;
  return *only;
}

Pool& default_pool(int device) {
  const std::lock_guard lock(pools().mutex);
  return pools().all[static_cast<std::size_t>(device)];
}

Pool& pool_of(cudaMemPool_t pool) { return *reinterpret_cast<Pool*>(pool); }

}  // namespace

namespace opacus_memprof::virtual_gpu {

bool release_from_pool(void* address) {
  if (machine().devices.empty()) {
    return false;
  }
  const std::lock_guard lock(pools().mutex);
  return std::any_of(pools().all.begin(), pools().all.end(),
                     [&](Pool& pool) { return pool.release(address); });
}

}  // namespace opacus_memprof::virtual_gpu

extern "C" {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  if (!valid_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  *pool = reinterpret_cast<cudaMemPool_t>(&default_pool(device));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  const int device = properties->location.id;
  if (!valid_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  const std::lock_guard lock(pools().mutex);
  *pool = reinterpret_cast<cudaMemPool_t>(&pools().all.emplace_back(machine().memory, device));
  return cudaSuccess;
}

// What is still in use stays, as it does on a GPU.
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return cudaMemPoolTrimTo(pool, 0); }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  auto& bytes = *static_cast<std::uint64_t*>(value);
  switch (attribute) {
    case cudaMemPoolAttrUsedMemCurrent:
      bytes = pool_of(pool).used().current;
      break;
    case cudaMemPoolAttrUsedMemHigh:
      bytes = pool_of(pool).used().high;
      break;
    case cudaMemPoolAttrReservedMemCurrent:
      bytes = pool_of(pool).reserved().current;
      break;
    case cudaMemPoolAttrReservedMemHigh:
      bytes = pool_of(pool).reserved().high;
      break;
    case cudaMemPoolAttrReleaseThreshold:
      bytes = UINT64_MAX;
      break;
    default:  // whether freed memory may be used again across streams
      *static_cast<int*>(value) = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute,
                                    void* /*value*/) {
  if (attribute == cudaMemPoolAttrUsedMemHigh) {
    pool_of(pool).reset_used_high();
  } else if (attribute == cudaMemPoolAttrReservedMemHigh) {
    pool_of(pool).reset_reserved_high();
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t keep) {
  pool_of(pool).trim(keep);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** address, std::size_t size, cudaStream_t /*stream*/) {
  if (const cudaError_t error = virtual_gpu::ready()) {
    return error;
  }
  *address = size == 0 ? nullptr : default_pool(current_device()).allocate(size);
  return *address == nullptr && size > 0 ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** address, std::size_t size, cudaMemPool_t pool,
                                    cudaStream_t /*stream*/) {
  *address = size == 0 ? nullptr : pool_of(pool).allocate(size);
  return *address == nullptr && size > 0 ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t /*stream*/) { return cudaFree(address); }
}
