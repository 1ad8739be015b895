// SPDX-License-Identifier: Apache-2.0
// libcudart: devices, memory and errors. Streams, graphs and kernels are in runtime_streams.cpp and
// runtime_kernels.cpp.
#include <cuda_runtime_api.h>

#include <cctype>
#include <cstdio>
#include <cstring>
#include <string>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/machine/observer.h"
#include "virtual_gpu/runtime/status.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::current_device;
using virtual_gpu::fail;
using virtual_gpu::Kind;
using virtual_gpu::machine;
using virtual_gpu::ready;
using virtual_gpu::valid_device;

namespace {

cudaError_t last_error(bool clear) {
  const cudaError_t error = virtual_gpu::last_error();
  if (clear) {
    virtual_gpu::last_error() = cudaSuccess;
  }
  return error;
}

cudaError_t allocate(void** address, std::size_t size, Kind kind) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  if (size == 0) {
    *address = nullptr;
    return cudaSuccess;
  }
  *address = machine().memory.allocate(current_device(), size, kind);
  return *address == nullptr ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t release(void* address) {
  // First the pools: a chunk of theirs starts where its first block does.
  if (address == nullptr || virtual_gpu::release_from_pool(address) ||
      machine().memory.release(address)) {
    return cudaSuccess;
  }
  return fail(cudaErrorInvalidValue);
}

}  // namespace

namespace opacus_memprof::virtual_gpu {

cudaError_t& last_error() {
  thread_local cudaError_t error = cudaSuccess;
  return error;
}

cudaError_t fail(cudaError_t error) {
  last_error() = lost_by_fork() ? cudaErrorInitializationError : error;
  return last_error();
}

cudaError_t ready() { return usable() ? cudaSuccess : fail(cudaErrorNoDevice); }

}  // namespace opacus_memprof::virtual_gpu

extern "C" {

// --- devices ---

cudaError_t cudaGetDeviceCount(int* count) {
  *count = virtual_gpu::usable() ? virtual_gpu::visible_devices() : 0;
  return ready();
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return ready();
}

cudaError_t cudaSetDevice(int device) {
  if (!valid_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  current_device() = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine().driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!valid_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  const auto& of = machine().devices[static_cast<std::size_t>(device)];
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "%s", of.name);
  const std::string uuid = virtual_gpu::uuid_of(virtual_gpu::number_of(device));
  std::size_t digits = 0;
  for (const char each : uuid.substr(std::strlen("GPU-"))) {
    if (std::isxdigit(static_cast<unsigned char>(each)) &&
        digits < 2 * sizeof properties->uuid.bytes) {
      const int value = std::stoi(std::string(1, each), nullptr, 16);
      properties->uuid.bytes[digits / 2] |= static_cast<char>(digits % 2 ? value : value << 4);
      ++digits;
    }
  }
  properties->pciBusID = device + 1;
  properties->totalGlobalMem = of.total_memory;
  properties->major = of.major;
  properties->minor = of.minor;
  properties->multiProcessorCount = of.multiprocessors;
  properties->maxThreadsPerMultiProcessor = of.threads_per_multiprocessor;
  properties->maxBlocksPerMultiProcessor = of.blocks_per_multiprocessor;
  properties->sharedMemPerBlock = virtual_gpu::kSharedMemoryPerBlock;
  properties->sharedMemPerBlockOptin = static_cast<std::size_t>(of.shared_memory_per_block_optin);
  properties->sharedMemPerMultiprocessor =
      static_cast<std::size_t>(of.shared_memory_per_multiprocessor);
  properties->reservedSharedMemPerBlock =
      of.major >= 8 ? virtual_gpu::kReservedSharedMemory : std::size_t{0};
  properties->regsPerBlock = virtual_gpu::kRegisters;
  properties->regsPerMultiprocessor = virtual_gpu::kRegisters;
  properties->l2CacheSize = of.l2_cache;
  properties->memoryBusWidth = of.memory_bus_bits;
#if CUDART_VERSION < 13000
  properties->clockRate = of.clock_khz;
  properties->memoryClockRate = of.memory_clock_khz;
  properties->deviceOverlap = 1;
#endif
  properties->warpSize = virtual_gpu::kWarpSize;
  properties->maxThreadsPerBlock = virtual_gpu::kThreadsPerBlock;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = virtual_gpu::kThreadsPerBlock;
  properties->maxThreadsDim[2] = virtual_gpu::kBlockDepth;
  properties->maxGridSize[0] = virtual_gpu::kGridWidth;
  properties->maxGridSize[1] = properties->maxGridSize[2] = virtual_gpu::kGridHeight;
  properties->totalConstMem = virtual_gpu::kConstantMemory;
  properties->textureAlignment = virtual_gpu::kTextureAlignment;
  properties->asyncEngineCount = virtual_gpu::kCopyEngines;
  properties->concurrentKernels = 1;
  properties->unifiedAddressing = 1;
  properties->canMapHostMemory = 1;
  properties->managedMemory = 1;
  properties->memoryPoolsSupported = 1;
  properties->streamPrioritiesSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!valid_device(device)) {
    return fail(cudaErrorInvalidDevice);
  }
  *value = virtual_gpu::attribute(machine().devices[static_cast<std::size_t>(device)],
                                  static_cast<int>(attribute));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = static_cast<int>(device != peer);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// --- memory ---

cudaError_t cudaMalloc(void** address, std::size_t size) {
  return allocate(address, size, Kind::device);
}

cudaError_t cudaMallocManaged(void** address, std::size_t size, unsigned /*flags*/) {
  const cudaError_t error = allocate(address, size, Kind::managed);
  if (error == cudaSuccess && *address != nullptr) virtual_gpu::share(*address, size);
  return error;
}

cudaError_t cudaFree(void* address) { return release(address); }

cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  *available = machine().memory.free(current_device());
  *total = machine().memory.total(current_device());
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, std::size_t size, unsigned /*flags*/) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  *address = machine().memory.allocate_pinned(size);
  if (*address == nullptr) {
    return fail(cudaErrorMemoryAllocation);
  }
  virtual_gpu::share(*address, size);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** address, std::size_t size) {
  return cudaHostAlloc(address, size, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* address) { return release(address); }

cudaError_t cudaHostRegister(void* address, std::size_t size, unsigned /*flags*/) {
  if (!machine().memory.pin(address, size)) {
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  virtual_gpu::share(address, size);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  return machine().memory.release(address) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned /*flags*/) {
  *on_device = on_host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->hostPointer = const_cast<void*>(address);
  const auto range = machine().memory.find(address);
  if (!range) {
    return cudaSuccess;
  }
  attributes->devicePointer = const_cast<void*>(address);
  if (range->kind == Kind::pinned) {
    attributes->type = cudaMemoryTypeHost;
  } else {
    attributes->type = range->kind == Kind::managed ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
    attributes->device = range->device;
    attributes->hostPointer = nullptr;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  virtual_gpu::Outside().copy(to, from, size);
  virtual_gpu::copy(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  machine().streams.launch(reinterpret_cast<virtual_gpu::Handle>(stream),
                           [=, outside = virtual_gpu::Outside()] {
                             outside.copy(to, from, size);
                             virtual_gpu::copy(to, from, size);
                           });
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                std::size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  machine().streams.launch(
      reinterpret_cast<virtual_gpu::Handle>(stream), [=, outside = virtual_gpu::Outside()] {
        for (std::size_t row = 0; row < height; ++row) {
          outside.copy(static_cast<char*>(to) + row * to_pitch,
                       static_cast<const char*>(from) + row * from_pitch, width);
        }
        virtual_gpu::copy_rows(to, to_pitch, from, from_pitch, width, height);
      });
  return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
}

// Of memory; arrays do not exist here.
cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* copy, cudaStream_t stream) {
  if (copy->srcArray != nullptr || copy->dstArray != nullptr) {
    return fail(cudaErrorNotSupported);
  }
  const auto at = [](const cudaPitchedPtr& memory, const cudaPos& position, std::size_t layer) {
    return static_cast<char*>(memory.ptr) +
           ((position.z + layer) * memory.ysize + position.y) * memory.pitch + position.x;
  };
  for (std::size_t layer = 0; layer < copy->extent.depth; ++layer) {
    cudaMemcpy2DAsync(at(copy->dstPtr, copy->dstPos, layer), copy->dstPtr.pitch,
                      at(copy->srcPtr, copy->srcPos, layer), copy->srcPtr.pitch, copy->extent.width,
                      copy->extent.height, copy->kind, stream);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* copy) { return cudaMemcpy3DAsync(copy, nullptr); }

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                           std::size_t size) {
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, size, nullptr);
}

cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width,
                              std::size_t height, cudaStream_t stream) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  machine().streams.launch(
      reinterpret_cast<virtual_gpu::Handle>(stream), [=, outside = virtual_gpu::Outside()] {
        for (std::size_t row = 0; row < height && width * height <= virtual_gpu::kSmall; ++row) {
          outside.fill(static_cast<char*>(to) + row * pitch, &value, 1, width);
          virtual_gpu::fill(static_cast<char*>(to) + row * pitch, value, width);
        }
      });
  return cudaSuccess;
}

cudaError_t cudaMemset2D(void* to, std::size_t pitch, int value, std::size_t width,
                         std::size_t height) {
  return cudaMemset2DAsync(to, pitch, value, width, height, nullptr);
}

cudaError_t cudaMemset(void* to, int value, std::size_t size) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  virtual_gpu::Outside().fill(to, &value, 1, size);
  virtual_gpu::fill(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t size, cudaStream_t stream) {
  if (const cudaError_t error = ready()) {
    return error;
  }
  machine().streams.launch(reinterpret_cast<virtual_gpu::Handle>(stream),
                           [=, outside = virtual_gpu::Outside()] {
                             outside.fill(to, &value, 1, size);
                             virtual_gpu::fill(to, value, size);
                           });
  return cudaSuccess;
}

// --- errors (their names are in errors.cpp) ---

cudaError_t cudaGetLastError() { return last_error(true); }
cudaError_t cudaPeekAtLastError() { return last_error(false); }

// --- memory of other processes ---

// Device memory is this process' alone.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* /*handle*/, void* /*address*/) {
  return fail(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenMemHandle(void** /*address*/, cudaIpcMemHandle_t /*handle*/,
                                 unsigned /*flags*/) {
  return fail(cudaErrorNotSupported);
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* /*handle*/, cudaEvent_t /*event*/) {
  return fail(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* /*event*/, cudaIpcEventHandle_t /*handle*/) {
  return fail(cudaErrorNotSupported);
}
}
