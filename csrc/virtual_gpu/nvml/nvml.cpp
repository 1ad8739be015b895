// SPDX-License-Identifier: Apache-2.0
// libnvidia-ml: a library of its own, since programs open it by name. Its devices are those of the
// machine.
//
// Declared here: torch's wheels do not bring NVML's header.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;

struct Memory {
  unsigned long long total, free, used;
};

// A device's handle is its number, and not 0.
int number(void* device) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(device)) - 1; }

int devices() {
  int count = 0;
  cudaGetDeviceCount(&count);
  cudaGetLastError();
  return count;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlInit() { return kSuccess; }
int nvmlInitWithFlags(unsigned /*flags*/) { return kSuccess; }
int nvmlShutdown() { return kSuccess; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(devices());
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
  return static_cast<int>(index) < devices() ? kSuccess : kNotFound;
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
  std::snprintf(uuid, length, "GPU-76697274-7561-6c20-6770-7520%08x", number(device));
  return kSuccess;
}

int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, number(device));
  std::snprintf(name, length, "%s", properties.name);
  return kSuccess;
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  int before = 0;
  std::size_t available = 0;
  std::size_t total = 0;
  cudaGetDevice(&before);
  cudaSetDevice(number(device));
  cudaMemGetInfo(&available, &total);
  cudaSetDevice(before);
  *memory = {total, available, total - available};
  return kSuccess;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* /*device*/, unsigned* count, void* /*infos*/) {
  *count = 0;
  return kSuccess;
}

int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* infos) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  unsigned index = 0;
  if (std::sscanf(uuid, "GPU-76697274-7561-6c20-6770-7520%8x", &index) != 1) {
    return kNotFound;
  }
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  cudaDriverGetVersion(version);
  return kSuccess;
}

// It computes nothing: it is never busy.
int nvmlDeviceGetUtilizationRates(void* /*device*/, unsigned* percent) {
  percent[0] = percent[1] = 0;  // of the time, and of the memory's bandwidth
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

// What a virtual GPU does not have. torch refuses to start where the first two are missing.
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetTemperature(void*, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetPowerUsage(void*, unsigned*) { return kNotSupported; }
int nvmlDeviceGetClockInfo(void*, int, unsigned*) { return kNotSupported; }

const char* nvmlErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "Success";
    case kNotSupported:
      return "Not Supported";
    case kNotFound:
      return "Not Found";
    default:
      return "Unknown Error";
  }
}
}
