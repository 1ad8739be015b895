// SPDX-License-Identifier: Apache-2.0
// libnvidia-ml: a library of its own, since programs open it by name. Its devices are those of the
// machine.
//
// Declared here: torch's wheels do not bring NVML's header.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" void memprof_virtual_gpu_ask_without_driver(int asks);
extern "C" int memprof_virtual_gpu_present();
extern "C" int memprof_virtual_gpu_device(int number);
extern "C" void memprof_virtual_gpu_uuid(int number, char* text, unsigned size);

namespace {

// While it lives, the runtime is asked without using the driver: before a fork, and after one.
struct WithoutDriver {
  WithoutDriver() { memprof_virtual_gpu_ask_without_driver(1); }
  ~WithoutDriver() { memprof_virtual_gpu_ask_without_driver(0); }
  WithoutDriver(const WithoutDriver&) = delete;
  WithoutDriver& operator=(const WithoutDriver&) = delete;
};

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr int kTooSmall = 7;
constexpr std::size_t kUuidSize = 96;  // NVML_DEVICE_UUID_V2_BUFFER_SIZE

struct Memory {
  unsigned long long total, free, used;
};

struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

struct Process {
  unsigned id;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};

struct Pci {
  char old_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

// A device's handle is its number, and not 0.
int number(void* device) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(device)) - 1; }

// The number that the program has for it.
int ordinal(void* device) { return memprof_virtual_gpu_device(number(device)); }

cudaDeviceProp properties_of(void* device) {
  const WithoutDriver asking;
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, ordinal(device));
  return properties;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlInit() { return kSuccess; }
int nvmlInitWithFlags(unsigned /*flags*/) { return kSuccess; }
int nvmlShutdown() { return kSuccess; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(memprof_virtual_gpu_present());
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
  return static_cast<int>(index) < memprof_virtual_gpu_present() ? kSuccess : kNotFound;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  unsigned domain = 0;
  unsigned bus = 0;
  if (std::sscanf(id, "%x:%x", &domain, &bus) != 2 || bus == 0) {
    return kNotFound;
  }
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}

int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  memprof_virtual_gpu_uuid(number(device), uuid, length);
  return kSuccess;
}

int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  std::snprintf(name, length, "%s", properties_of(device).name);
  return kSuccess;
}

int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = static_cast<unsigned>(number(device));
  return kSuccess;
}

int nvmlDeviceGetMinorNumber(void* device, unsigned* index) {
  return nvmlDeviceGetIndex(device, index);
}

int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  const cudaDeviceProp properties = properties_of(device);
  *major = properties.major;
  *minor = properties.minor;
  return kSuccess;
}

int nvmlDeviceGetPciInfo_v3(void* device, Pci* pci) {
  *pci = {};
  pci->bus = static_cast<unsigned>(number(device)) + 1;
  std::snprintf(pci->old_id, sizeof pci->old_id, "0000:%02X:00.0", pci->bus);
  std::snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
  return kSuccess;
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  int before = 0;
  std::size_t available = 0;
  std::size_t total = 0;
  const int place = ordinal(device);
  const WithoutDriver asking;
  cudaGetDevice(&before);
  cudaSetDevice(place);
  cudaMemGetInfo(&available, &total);
  cudaSetDevice(before);
  *memory = {total, available, total - available};
  return kSuccess;
}

int nvmlDeviceGetMemoryInfo_v2(void* device, Memory2* memory) {
  Memory found;
  nvmlDeviceGetMemoryInfo(device, &found);
  *memory = {memory->version, found.total, 0, found.free, found.used};
  return kSuccess;
}

// Of the processes on the GPU only this one is seen.
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* processes) {
  const unsigned room = *count;
  Memory memory;
  nvmlDeviceGetMemoryInfo(device, &memory);
  *count = memory.used > 0 ? 1 : 0;
  if (room < *count) {
    return kTooSmall;
  }
  if (*count > 0) {
    constexpr unsigned kNoInstance = ~0U;
    processes[0] = {static_cast<unsigned>(getpid()), memory.used, kNoInstance, kNoInstance};
  }
  return kSuccess;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void* device, unsigned* count, Process* processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}

// torch asks by this name, for the message of an out-of-memory error. Its structures have no
// instances.
int nvmlDeviceGetComputeRunningProcesses(void* /*device*/, unsigned* count, void* /*infos*/) {
  *count = 0;
  return kSuccess;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void* /*device*/, unsigned* count, void* /*infos*/) {
  *count = 0;
  return kSuccess;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void* /*device*/, unsigned* count, void* /*infos*/) {
  *count = 0;
  return kSuccess;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int index = 0; index < memprof_virtual_gpu_present(); ++index) {
    char known[kUuidSize];
    memprof_virtual_gpu_uuid(index, known, sizeof known);
    if (std::strcmp(known, uuid) == 0) {
      return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(index), device);
    }
  }
  return kNotFound;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  cudaDriverGetVersion(version);
  return kSuccess;
}

int nvmlSystemGetCudaDriverVersion(int* version) {
  return nvmlSystemGetCudaDriverVersion_v2(version);
}

// That of CUDA 13.2, which the virtual driver is one of.
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::snprintf(version, length, "595.45.04");
  return kSuccess;
}

int nvmlSystemGetNVMLVersion(char* version, unsigned length) {
  std::snprintf(version, length, "13.595.45.04");
  return kSuccess;
}

// It computes nothing: it is never busy, takes no power and does not get warm.
int nvmlDeviceGetUtilizationRates(void* /*device*/, unsigned* percent) {
  percent[0] = percent[1] = 0;  // of the time, and of the memory's bandwidth
  return kSuccess;
}

int nvmlDeviceGetTemperature(void* /*device*/, int /*sensor*/, unsigned* degrees) {
  *degrees = 0;
  return kSuccess;
}

// The structure's version, the sensor, and the degrees.
int nvmlDeviceGetTemperatureV(void* /*device*/, int* temperature) {
  temperature[2] = 0;
  return kSuccess;
}

int nvmlDeviceGetPowerUsage(void* /*device*/, unsigned* milliwatts) {
  *milliwatts = 0;
  return kSuccess;
}

int nvmlDeviceGetClockInfo(void* /*device*/, int /*clock*/, unsigned* megahertz) {
  *megahertz = 0;
  return kSuccess;
}

// Between any two devices peers may read and write (0 is NVML_P2P_STATUS_OK).
int nvmlDeviceGetP2PStatus(void* /*one*/, void* /*other*/, int /*what*/, int* status) {
  *status = 0;
  return kSuccess;
}

// It belongs to no fabric. What follows the structure's version: the cluster's id, and six numbers.
int nvmlDeviceGetGpuFabricInfoV(void* /*device*/, void* info) {
  std::memset(static_cast<char*>(info) + sizeof(int), 0, 28);
  return kSuccess;
}

// What a virtual GPU does not have. torch refuses to start where it finds no function for NVLink,
// and programs that show GPUs complain of a driver that lacks one of the others.
#define REFUSED(name) \
  int name() { return kNotSupported; }
REFUSED(nvmlDeviceGetAccountingMode)
REFUSED(nvmlDeviceGetArchitecture)
REFUSED(nvmlDeviceGetAttributes_v2)
REFUSED(nvmlDeviceGetBAR1MemoryInfo)
REFUSED(nvmlDeviceGetBoardId)
REFUSED(nvmlDeviceGetBrand)
REFUSED(nvmlDeviceGetComputeInstanceId)
REFUSED(nvmlDeviceGetComputeMode)
REFUSED(nvmlDeviceGetConfComputeMemSizeInfo)
REFUSED(nvmlDeviceGetCpuAffinity)
REFUSED(nvmlDeviceGetCpuAffinityWithinScope)
REFUSED(nvmlDeviceGetCurrPcieLinkGeneration)
REFUSED(nvmlDeviceGetCurrPcieLinkWidth)
REFUSED(nvmlDeviceGetCurrentClocksEventReasons)
REFUSED(nvmlDeviceGetCurrentClocksThrottleReasons)
REFUSED(nvmlDeviceGetDecoderUtilization)
REFUSED(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)
REFUSED(nvmlDeviceGetDisplayActive)
REFUSED(nvmlDeviceGetDisplayMode)
REFUSED(nvmlDeviceGetDriverModel)
REFUSED(nvmlDeviceGetDriverModel_v2)
REFUSED(nvmlDeviceGetEccMode)
REFUSED(nvmlDeviceGetEncoderUtilization)
REFUSED(nvmlDeviceGetEnforcedPowerLimit)
REFUSED(nvmlDeviceGetFanSpeed)
REFUSED(nvmlDeviceGetFieldValues)
REFUSED(nvmlDeviceGetGpuInstanceId)
REFUSED(nvmlDeviceGetMaxClockInfo)
REFUSED(nvmlDeviceGetMaxMigDeviceCount)
REFUSED(nvmlDeviceGetMaxPcieLinkGeneration)
REFUSED(nvmlDeviceGetMaxPcieLinkWidth)
REFUSED(nvmlDeviceGetMemoryAffinity)
REFUSED(nvmlDeviceGetMemoryBusWidth)
REFUSED(nvmlDeviceGetMemoryErrorCounter)
REFUSED(nvmlDeviceGetMigDeviceHandleByIndex)
REFUSED(nvmlDeviceGetMigMode)
REFUSED(nvmlDeviceGetModuleId)
REFUSED(nvmlDeviceGetNumGpuCores)
REFUSED(nvmlDeviceGetNumaNodeId)
REFUSED(nvmlDeviceGetNvLinkCapability)
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSED(nvmlDeviceGetNvLinkState)
REFUSED(nvmlDeviceGetNvLinkVersion)
REFUSED(nvmlDeviceGetPcieThroughput)
REFUSED(nvmlDeviceGetPerformanceState)
REFUSED(nvmlDeviceGetPersistenceMode)
REFUSED(nvmlDeviceGetPowerManagementDefaultLimit)
REFUSED(nvmlDeviceGetPowerManagementLimit)
REFUSED(nvmlDeviceGetPowerUsageV)
REFUSED(nvmlDeviceGetProcessUtilization)
REFUSED(nvmlDeviceGetRetiredPages)
REFUSED(nvmlDeviceGetRunningProcessDetailList)
REFUSED(nvmlDeviceGetSerial)
REFUSED(nvmlDeviceGetTemperatureThreshold)
REFUSED(nvmlDeviceGetThermalSettings)
REFUSED(nvmlDeviceGetTopologyCommonAncestor)
REFUSED(nvmlDeviceGetTotalEccErrors)
REFUSED(nvmlDeviceGetTotalEnergyConsumption)
REFUSED(nvmlDeviceGetVbiosVersion)
REFUSED(nvmlDeviceGetVirtualizationMode)
REFUSED(nvmlDeviceIsMigDeviceHandle)
#undef REFUSED

const char* nvmlErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "Success";
    case kNotSupported:
      return "Not Supported";
    case kNotFound:
      return "Not Found";
    case kTooSmall:
      return "Insufficient Size";
    default:
      return "Unknown Error";
  }
}
}
