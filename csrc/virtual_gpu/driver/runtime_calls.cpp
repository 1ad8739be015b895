// SPDX-License-Identifier: Apache-2.0
// libcuda: what the runtime has as well, under other names. Their errors have the same numbers.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/machine/observer.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::machine;
using virtual_gpu::pointer;

namespace {

static_assert(static_cast<int>(CUDA_ERROR_OUT_OF_MEMORY) == cudaErrorMemoryAllocation);
static_assert(static_cast<int>(CUDA_ERROR_INVALID_HANDLE) == cudaErrorInvalidResourceHandle);
static_assert(static_cast<int>(CUDA_ERROR_STREAM_CAPTURE_UNJOINED) ==
              cudaErrorStreamCaptureUnjoined);

// The driver has no last error.
CUresult result(cudaError_t error) {
  cudaGetLastError();
  return static_cast<CUresult>(error);
}

void** pointers(CUdeviceptr* address) { return reinterpret_cast<void**>(address); }

CUresult copy(void* to, const void* from, std::size_t size, CUstream stream) {
  return result(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream));
}

// Values of `width` bytes.
CUresult fill(CUdeviceptr to, unsigned value, std::size_t width, std::size_t count,
              CUstream stream) {
  machine().streams.launch(reinterpret_cast<virtual_gpu::Handle>(stream),
                           [=, outside = virtual_gpu::Outside()] {
                             outside.fill(pointer(to), &value, width, count);
                             virtual_gpu::fill_pattern(pointer(to), &value, width, count);
                           });
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// --- devices ---

CUresult CUDAAPI cuCtxSynchronize() { return result(cudaDeviceSynchronize()); }

// Declared in a header that torch's wheels do not bring.
CUresult CUDAAPI cuProfilerInitialize(const char* /*configuration*/, const char* /*output*/,
                                      int /*mode*/) {
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuProfilerStart() { return CUDA_SUCCESS; }
CUresult CUDAAPI cuProfilerStop() { return CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return result(cudaDeviceCanAccessPeer(can, device, peer));
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  return result(cudaDeviceGetPCIBusId(id, length, device));
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) {
    *uuid = properties.uuid;
  }
  return result(error);
}

// --- memory ---

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr* address, std::size_t size, unsigned flags) {
  return result(cudaMallocManaged(pointers(address), size, flags));
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr* address, std::size_t size, CUstream stream) {
  return result(cudaMallocAsync(pointers(address), size, stream));
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  return result(cudaFreeAsync(pointer(address), stream));
}

CUresult CUDAAPI cuMemHostAlloc(void** address, std::size_t size, unsigned flags) {
  return result(cudaHostAlloc(address, size, flags));
}

CUresult CUDAAPI cuMemAllocHost(void** address, std::size_t size) {
  return result(cudaMallocHost(address, size));
}

CUresult CUDAAPI cuMemFreeHost(void* address) { return result(cudaFreeHost(address)); }

CUresult CUDAAPI cuMemHostRegister(void* address, std::size_t size, unsigned flags) {
  return result(cudaHostRegister(address, size, flags));
}

CUresult CUDAAPI cuMemHostUnregister(void* address) { return result(cudaHostUnregister(address)); }

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* on_device, void* on_host, unsigned flags) {
  return result(cudaHostGetDevicePointer(pointers(on_device), on_host, flags));
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* start, std::size_t* size, CUdeviceptr address) {
  const auto range = machine().memory.find(pointer(address));
  if (!range) {
    return CUDA_ERROR_NOT_FOUND;
  }
  if (start != nullptr) {
    *start = range->start;
  }
  if (size != nullptr) {
    *size = range->size;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  return copy(pointer(to), pointer(from), size, nullptr);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t size,
                               CUstream stream) {
  return copy(pointer(to), pointer(from), size, stream);
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  return copy(pointer(to), pointer(from), size, nullptr);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t size,
                                   CUstream stream) {
  return copy(pointer(to), pointer(from), size, stream);
}

CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext /*to_context*/, CUdeviceptr from,
                              CUcontext /*from_context*/, std::size_t size) {
  return copy(pointer(to), pointer(from), size, nullptr);
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext /*to_context*/, CUdeviceptr from,
                                   CUcontext /*from_context*/, std::size_t size, CUstream stream) {
  return copy(pointer(to), pointer(from), size, stream);
}

CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (copy->srcMemoryType == CU_MEMORYTYPE_ARRAY || copy->dstMemoryType == CU_MEMORYTYPE_ARRAY) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const auto* const from = copy->srcMemoryType == CU_MEMORYTYPE_HOST
                               ? static_cast<const char*>(copy->srcHost)
                               : static_cast<const char*>(pointer(copy->srcDevice));
  auto* const to = copy->dstMemoryType == CU_MEMORYTYPE_HOST
                       ? static_cast<char*>(copy->dstHost)
                       : static_cast<char*>(pointer(copy->dstDevice));
  return result(
      cudaMemcpy2DAsync(to + copy->dstY * copy->dstPitch + copy->dstXInBytes, copy->dstPitch,
                        from + copy->srcY * copy->srcPitch + copy->srcXInBytes, copy->srcPitch,
                        copy->WidthInBytes, copy->Height, cudaMemcpyDefault, stream));
}

CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D* copy) { return cuMemcpy2DAsync(copy, nullptr); }

CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* copy) {
  return cuMemcpy2DAsync(copy, nullptr);
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t size) {
  return result(cudaMemcpy(pointer(to), from, size, cudaMemcpyDefault));
}

CUresult CUDAAPI cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t size) {
  return result(cudaMemcpy(to, pointer(from), size, cudaMemcpyDefault));
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t size,
                                   CUstream stream) {
  return copy(pointer(to), from, size, stream);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t size, CUstream stream) {
  return copy(to, pointer(from), size, stream);
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, std::size_t count) {
  return fill(to, value, 1, count, nullptr);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count,
                                 CUstream stream) {
  return fill(to, value, 1, count, stream);
}

CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned value, std::size_t count) {
  return fill(to, value, 4, count, nullptr);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t count,
                                  CUstream stream) {
  return fill(to, value, 4, count, stream);
}

// Device memory is this process' alone.
CUresult CUDAAPI cuMemExportToShareableHandle(void* /*shareable*/,
                                              CUmemGenericAllocationHandle /*handle*/,
                                              CUmemAllocationHandleType /*type*/,
                                              unsigned long long /*flags*/) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* /*handle*/,
                                                void* /*shareable*/,
                                                CUmemAllocationHandleType /*type*/) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* /*handle*/, CUdeviceptr /*address*/) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr* /*address*/, CUipcMemHandle /*handle*/,
                                    unsigned /*flags*/) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

// --- streams ---

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return result(cudaStreamCreateWithPriority(stream, flags, priority));
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) {
  return result(cudaStreamCreateWithFlags(stream, flags));
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) { return result(cudaStreamDestroy(stream)); }

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  return result(cudaStreamSynchronize(stream));
}

CUresult CUDAAPI cuStreamQuery(CUstream stream) { return result(cudaStreamQuery(stream)); }

CUresult CUDAAPI cuStreamGetPriority(CUstream stream, int* priority) {
  return result(cudaStreamGetPriority(stream, priority));
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return result(cudaStreamWaitEvent(stream, event, flags));
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return result(cudaLaunchHostFunc(stream, function, data));
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return result(cudaStreamBeginCapture(stream, static_cast<cudaStreamCaptureMode>(mode)));
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return result(cudaStreamEndCapture(stream, graph));
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return result(cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return result(
      cudaThreadExchangeStreamCaptureMode(reinterpret_cast<cudaStreamCaptureMode*>(mode)));
}

// --- events ---

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned flags) {
  return result(cudaEventCreateWithFlags(event, flags));
}

CUresult CUDAAPI cuEventDestroy(CUevent event) { return result(cudaEventDestroy(event)); }

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  return result(cudaEventRecord(event, stream));
}

CUresult CUDAAPI cuEventQuery(CUevent event) { return result(cudaEventQuery(event)); }

CUresult CUDAAPI cuEventSynchronize(CUevent event) { return result(cudaEventSynchronize(event)); }

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  return result(cudaEventElapsedTime(milliseconds, begin, end));
}

// --- graphs ---

CUresult CUDAAPI cuGraphCreate(CUgraph* graph, unsigned flags) {
  return result(cudaGraphCreate(graph, flags));
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec* executable, CUgraph graph,
                                    unsigned long long flags) {
  return result(cudaGraphInstantiateWithFlags(executable, graph, flags));
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  return result(cudaGraphLaunch(executable, stream));
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec executable) {
  return result(cudaGraphExecDestroy(executable));
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) { return result(cudaGraphDestroy(graph)); }
}
