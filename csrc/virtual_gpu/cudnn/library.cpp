// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/cudnn/library.h"

#include <dlfcn.h>
#include <linux/limits.h>

#include <cstdio>
#include <string>

#include "virtual_gpu/machine/device.h"
#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

namespace opacus_memprof::virtual_gpu {
namespace {

// Of cuDNN 9.8; named here, for the headers of an older one do not know them.
constexpr auto kDeviceDescriptor = static_cast<cudnnBackendDescriptorType_t>(38);
constexpr auto kDeviceJson = static_cast<cudnnBackendAttributeName_t>(2702);
constexpr std::size_t kFirstWithDevices = 90800;

// The libraries that libcudnn opens by itself. Opened before it does, they find each other's
// symbols before ours, which have the same names and are visible to everybody.
constexpr const char* kParts[] = {"graph",
                                  "ops",
                                  "heuristic",
                                  "engines_precompiled",
                                  "engines_runtime_compiled",
                                  "engines_tensor_ir"};

std::string name_of(const char* part) {
  return std::string("libcudnn") + part + ".so." + std::to_string(CUDNN_MAJOR);
}

void* open_library() {
  const std::string name = name_of("");
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  char folder[PATH_MAX];
  if (library == nullptr || dlinfo(library, RTLD_DI_ORIGIN, folder) != 0) {
    return library;
  }
  for (const char* part : kParts) {
    const std::string path = std::string(folder) + "/" + name_of((std::string("_") + part).c_str());
    dlopen(path.c_str(),
           RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);  // not all versions have all of them
  }
  return library;
}

// As cuDNN writes it for a GPU that is there.
std::string description(const DeviceProperties& device, int driver_version) {
  char text[2048];
  const int length = std::snprintf(
      text, sizeof text,
      R"({"cudaDeviceId":0,"deviceVer":%d,"driverVer":%d,"totalGlobalMem":%llu,)"
      R"("maxGridSize":[%d,%d,%d],"maxBlockSize":[%d,%d,%d],"regsPerBlock":%d,"multiProcessorCount":%d,)"
      R"("warpSize":%d,"maxSharedMemoryPerBlock":%d,"maxSharedMemoryPerBlockOptin":%d,)"
      R"("reservedSharedMemoryPerBlock":%d,"maxRegistersPerSM":%d,"maxCtasPerSM":%d,"maxThreadsPerBlock":%d,)"
      R"("maxThreadsPerSM":%d,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":%d,)"
      R"("memClockRateKHz":%d,"l2CacheSize":%d,"deviceName":"%s"})",
      device.major * 100 + device.minor * 10, driver_version,
      static_cast<unsigned long long>(device.total_memory), kGridWidth, kGridHeight, kGridHeight,
      kThreadsPerBlock, kThreadsPerBlock, kBlockDepth, kRegisters, device.multiprocessors,
      kWarpSize, kSharedMemoryPerBlock, device.shared_memory_per_block_optin,
      device.major >= 8 ? kReservedSharedMemory : 0, kRegisters, device.blocks_per_multiprocessor,
      kThreadsPerBlock, device.threads_per_multiprocessor, device.clock_khz,
      device.memory_clock_khz, device.l2_cache, device.name);
  return {text, static_cast<std::size_t>(length)};
}

cudnnBackendDescriptor_t make_device() {
  const auto& machine = virtual_gpu::machine();
  auto* const version = cudnn_function(&cudnnGetVersion, "cudnnGetVersion");
  if (machine.devices.empty() || version == nullptr || version() < kFirstWithDevices) {
    std::fputs(
        "opacus-memprof: the virtual GPU needs cuDNN 9.8 or later, and this torch brings an older "
        "one\n",
        stderr);
    return nullptr;
  }
  const std::string text = description(machine.devices.front(), machine.driver_version);
  cudnnBackendDescriptor_t device = nullptr;
  if (VIRTUAL_GPU_CUDNN(cudnnBackendCreateDescriptor, kDeviceDescriptor, &device) !=
          CUDNN_STATUS_SUCCESS ||
      VIRTUAL_GPU_CUDNN(cudnnBackendSetAttribute, device, kDeviceJson, CUDNN_TYPE_CHAR,
                        static_cast<std::int64_t>(text.size()),
                        text.data()) != CUDNN_STATUS_SUCCESS ||
      VIRTUAL_GPU_CUDNN(cudnnBackendFinalize, device) != CUDNN_STATUS_SUCCESS) {
    std::fputs("opacus-memprof: cuDNN does not understand what the virtual GPU says of itself\n",
               stderr);
    return nullptr;
  }
  return device;
}

}  // namespace

void* cudnn_symbol(const char* name) {
  static void* const library = open_library();
  return library == nullptr ? nullptr : dlsym(library, name);
}

cudnnBackendDescriptor_t cudnn_device() {
  static const cudnnBackendDescriptor_t device =
      make_device();  // all devices of a machine are of one kind
  return device;
}

}  // namespace opacus_memprof::virtual_gpu
