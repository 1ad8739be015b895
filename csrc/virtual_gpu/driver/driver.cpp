// SPDX-License-Identifier: Apache-2.0
// libcuda: what torch's allocator (expandable segments), Triton and the profilers ask the driver
// for.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <regex>
#include <string>

#include "virtual_gpu/defaults/defaults.h"
#include "virtual_gpu/driver/symbols.h"
#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::current_device;
using virtual_gpu::Kind;
using virtual_gpu::machine;
using virtual_gpu::pointer;
using virtual_gpu::valid_device;

namespace {

CUresult ready() {
  if (virtual_gpu::usable()) {
    return CUDA_SUCCESS;
  }
  return virtual_gpu::lost_by_fork() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_NO_DEVICE;
}

// What a number that no device has is answered with.
CUresult no_such_device() {
  const CUresult result = ready();
  return result == CUDA_SUCCESS ? CUDA_ERROR_INVALID_DEVICE : result;
}

// One context a device; its handle is the device's number, and not 0.
CUcontext context(int device) {
  return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
}

int device_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}

CUresult pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  const auto range = machine().memory.find(pointer(address));
  if (!range) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<CUdeviceptr*>(value) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) =
          range->kind == Kind::pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = context(range->device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = range->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(value) = range->kind == Kind::managed;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(value) = range->start;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<std::size_t*>(value) = range->size;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

namespace opacus_memprof::virtual_gpu {

void* driver_symbol(const char* name) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&driver_symbol), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  static const std::map<std::string, const char*> versions = {
#define VERSION(name, renamed) {name, renamed},
#include "versions.inc"
#undef VERSION
  };
  const auto renamed = versions.find(name);
  if (void* const found = dlsym(self, renamed == versions.end() ? name : renamed->second)) {
    return found;
  }
  // Graphics are asked for by every copy of the runtime, which does without.
  static const std::regex optional(R"(|cu(Graphics)?GL\w*|cu\w*(EGL|Egl|VDPAU|D3D)\w*)");
  if (!std::regex_match(name, optional)) {
    unknown_symbol(name);
  }
  return nullptr;
}

}  // namespace opacus_memprof::virtual_gpu

extern "C" {

// --- devices and contexts ---

CUresult CUDAAPI cuInit(unsigned /*flags*/) { return ready(); }

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = machine().driver_version;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  *count = virtual_gpu::visible_devices();
  return virtual_gpu::lost_by_fork() ? ready() : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return valid_device(ordinal) ? CUDA_SUCCESS : no_such_device();
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice device) {
  std::snprintf(name, static_cast<std::size_t>(length), "%s",
                machine().devices[static_cast<std::size_t>(device)].name);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  *bytes = machine().memory.total(device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!valid_device(device)) {
    return no_such_device();
  }
  *value = virtual_gpu::attribute(machine().devices[static_cast<std::size_t>(device)], attribute);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* current) {
  *current = context(current_device());
  return ready();
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext current) {
  if (current != nullptr) {
    current_device() = device_of(current);
  }
  return ready();
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext current) { return cuCtxSetCurrent(current); }

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* popped) { return cuCtxGetCurrent(popped); }

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice /*device*/, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* retained, CUdevice device) {
  *retained = context(device);
  return ready();
}

CUresult CUDAAPI cuMemGetInfo(std::size_t* available, std::size_t* total) {
  *available = machine().memory.free(current_device());
  *total = machine().memory.total(current_device());
  return ready();
}

// --- memory ---

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, std::size_t size) {
  if (const CUresult result = ready()) {
    return result;
  }
  *address = reinterpret_cast<CUdeviceptr>(machine().memory.allocate(current_device(), size));
  return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  return machine().memory.release(pointer(address)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                       CUdeviceptr address) {
  return pointer_attribute(value, attribute, address);
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes,
                                        void** values, CUdeviceptr address) {
  for (unsigned index = 0; index < count; ++index) {
    pointer_attribute(values[index], attributes[index], address);
  }
  return CUDA_SUCCESS;
}

// --- modules and kernels: see modules.cpp ---

CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr* address, std::size_t* size, CUmodule /*module*/,
                                   const char* /*name*/) {
  static char variables[1 << 16];
  *address = reinterpret_cast<CUdeviceptr>(variables);
  if (size != nullptr) {
    *size = sizeof variables;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                    CUfunction /*function*/) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = virtual_gpu::kThreadsPerBlock;
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 32;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction /*function*/,
                                                             int threads,
                                                             std::size_t /*shared_memory*/) {
  const auto& device = machine().devices[static_cast<std::size_t>(current_device())];
  *blocks = device.threads_per_multiprocessor / (threads > 0 ? threads : 1);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int* clusters, CUfunction /*function*/,
                                              const CUlaunchConfig* /*configuration*/) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

// --- symbols ---

CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** function, int version,
                                  cuuint64_t /*flags*/, CUdriverProcAddressQueryResult* status) {
  // A driver of this version lacks what came later, which needs no sentence.
  std::optional<virtual_gpu::Asking> later;
  if (version > machine().driver_version) {
    later.emplace();
  }
  *function = virtual_gpu::driver_symbol(symbol);
  if (status != nullptr) {
    *status =
        *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Asked for by copies of the CUDA runtime that a library links statically, which want tables of
// private functions. NVRTC asks as well, and compiles without them.
CUresult CUDAAPI cuGetExportTable(const void** table, const CUuuid* /*id*/) {
  *table = nullptr;
  Dl_info asking;
  if (dladdr(__builtin_return_address(0), &asking) != 0 &&
      std::strstr(asking.dli_fname, "libnvrtc") != nullptr) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  virtual_gpu::unknown_symbol(
      "cuGetExportTable (a library that links CUDA's runtime statically cannot use the virtual "
      "GPU)");
  return CUDA_ERROR_NOT_SUPPORTED;
}
}
