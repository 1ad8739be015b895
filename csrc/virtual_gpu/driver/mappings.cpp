// SPDX-License-Identifier: Apache-2.0
// libcuda: memory and addresses apart, which are mapped to each other (torch's expandable
// segments).
#include <cuda.h>

#include <map>
#include <mutex>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::machine;
using virtual_gpu::pointer;

namespace {

// Physical memory without an address (cuMemCreate).
struct Allocation {
  int device = 0;
  std::size_t size = 0;
  int references = 1;  // the handle, and each mapping
};

std::mutex allocations_mutex;
std::map<CUmemGenericAllocationHandle, Allocation>& allocations() {
  static auto* const all = new std::map<CUmemGenericAllocationHandle, Allocation>;
  return *all;
}
std::map<CUdeviceptr, CUmemGenericAllocationHandle>& mappings() {
  static auto* const all = new std::map<CUdeviceptr, CUmemGenericAllocationHandle>;
  return *all;
}

// With the mutex held.
void drop_reference(CUmemGenericAllocationHandle handle) {
  const auto found = allocations().find(handle);
  if (found != allocations().end() && --found->second.references == 0) {
    machine().memory.give_back(found->second.device, found->second.size);
    allocations().erase(found);
  }
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity,
                                               const CUmemAllocationProp* /*properties*/,
                                               CUmemAllocationGranularity_flags /*option*/) {
  *granularity = virtual_gpu::kPage;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size,
                             const CUmemAllocationProp* properties, unsigned long long /*flags*/) {
  const int device = properties->location.id;
  if (device < 0 || device >= machine().memory.devices()) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  if (!machine().memory.take(device, size)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const std::lock_guard lock(allocations_mutex);
  *handle = machine().streams.create_handle();
  allocations()[*handle] = {device, size, 1};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(allocations_mutex);
  drop_reference(handle);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, std::size_t size,
                                     std::size_t /*alignment*/, CUdeviceptr /*wish*/,
                                     unsigned long long /*flags*/) {
  *address = reinterpret_cast<CUdeviceptr>(machine().memory.reserve_addresses(size));
  return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  return machine().memory.release_addresses(pointer(address), size) ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, std::size_t size, std::size_t /*offset*/,
                          CUmemGenericAllocationHandle handle, unsigned long long /*flags*/) {
  const std::lock_guard lock(allocations_mutex);
  const auto found = allocations().find(handle);
  if (found == allocations().end() ||
      !machine().memory.map(pointer(address), size, found->second.device)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ++found->second.references;
  mappings()[address] = handle;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, std::size_t size) {
  const std::lock_guard lock(allocations_mutex);
  for (auto at = mappings().lower_bound(address);
       at != mappings().end() && at->first < address + size;) {
    drop_reference(at->second);
    at = mappings().erase(at);
  }
  return machine().memory.unmap(pointer(address), size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const std::lock_guard lock(allocations_mutex);
  const auto range = machine().memory.find(address);
  const auto found = range ? mappings().find(range->start) : mappings().end();
  if (found == mappings().end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *handle = found->second;
  ++allocations()[*handle].references;
  return CUDA_SUCCESS;
}
}
