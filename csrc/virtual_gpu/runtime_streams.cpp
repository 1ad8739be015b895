// SPDX-License-Identifier: Apache-2.0
// libcudart: streams, events, CUDA graphs, and memory that is allocated in the order of a stream.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "virtual_gpu/machine.h"
#include "virtual_gpu/runtime_status.h"

using virtual_gpu::current_device;
using virtual_gpu::fail;
using virtual_gpu::Handle;
using virtual_gpu::machine;

namespace {

Handle handle(const void* object) { return reinterpret_cast<Handle>(object); }

template <class T>
T object(Handle handle) {
  return reinterpret_cast<T>(handle);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

extern "C" {

// --- streams ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int priority) {
  *stream = object<cudaStream_t>(machine().streams.create_stream(current_device(), priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return machine().streams.destroy_stream(handle(stream)) ? cudaSuccess
                                                          : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = machine().streams.priority(handle(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  machine().streams.wait(handle(stream), handle(event));
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned /*flags*/) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (machine().streams.capture(handle(stream))) {
    machine().streams.launch(handle(stream));  // it would run with each replay, and never here
  } else {
    function(data);
  }
  return cudaSuccess;
}

// --- events ---

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = object<cudaEvent_t>(machine().streams.create_event());
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  machine().streams.destroy_event(handle(event));
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned /*flags*/) {
  machine().streams.record(handle(event), handle(stream));
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = static_cast<float>(machine().streams.milliseconds(handle(begin), handle(end)));
  return cudaSuccess;
}

// --- captures and graphs ---

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  return machine().streams.begin_capture(handle(stream))
             ? cudaSuccess
             : fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t* /*dependencies*/,
                                          const cudaGraphEdgeData* /*data*/, std::size_t /*count*/,
                                          cudaStreamCaptureMode /*mode*/) {
  return machine().streams.begin_capture(handle(stream), handle(graph))
             ? cudaSuccess
             : fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const auto ended = machine().streams.end_capture(handle(stream));
  *graph = object<cudaGraph_t>(ended.value_or(0));
  return ended ? cudaSuccess : fail(cudaErrorStreamCaptureUnmatched);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = machine().streams.capture(handle(stream)) ? cudaStreamCaptureStatusActive
                                                      : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* count) {
  if (edges != nullptr) {
    *edges = nullptr;
  }
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** dependencies, std::size_t* count) {
#endif
  const auto capture = machine().streams.capture(handle(stream));
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) {
    *id = capture ? capture->id : 0;
  }
  if (graph != nullptr) {
    *graph = capture ? object<cudaGraph_t>(capture->graph) : nullptr;
  }
  if (dependencies != nullptr) {
    *dependencies = nullptr;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned /*flags*/) {
  *graph = object<cudaGraph_t>(machine().streams.create_graph());
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  const std::size_t there = machine().streams.nodes(handle(graph));
  if (nodes != nullptr) {
    *count = std::min(*count, there);
    std::for_each_n(nodes, *count, [](cudaGraphNode_t& node) { virtual_gpu::make_handle(&node); });
  } else {
    *count = there;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t /*graph*/,
                                          unsigned long long /*flags*/) {
  virtual_gpu::make_handle(executable);
  return cudaSuccess;
}

#if CUDART_VERSION >= 12000
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
#endif

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  machine().streams.destroy_graph(handle(graph));
  return cudaSuccess;
}
}

// --- memory in the order of a stream (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync) ---

namespace {

// A pool's books. What the driver reserves grows in steps of 32 MiB and shrinks when it is trimmed
// (measured on an H200: benchmarks/virtual_gpu_constants.py).
class Pool {
 public:
  void add(std::size_t size) {
    const std::lock_guard lock(mutex_);
    used_ += size;
    used_high_ = std::max(used_high_, used_);
    reserved_ = std::max(reserved_, (used_ + kStep - 1) / kStep * kStep);
    reserved_high_ = std::max(reserved_high_, reserved_);
  }
  void remove(std::size_t size) {
    const std::lock_guard lock(mutex_);
    used_ -= std::min(size, used_);
  }
  void trim(std::size_t keep) {
    const std::lock_guard lock(mutex_);
    reserved_ = std::max((used_ + kStep - 1) / kStep * kStep, std::min(keep, reserved_));
  }
  std::size_t get(cudaMemPoolAttr attribute) {
    const std::lock_guard lock(mutex_);
    switch (attribute) {
      case cudaMemPoolAttrUsedMemCurrent:
        return used_;
      case cudaMemPoolAttrUsedMemHigh:
        return used_high_;
      case cudaMemPoolAttrReservedMemCurrent:
        return reserved_;
      case cudaMemPoolAttrReservedMemHigh:
        return reserved_high_;
      default:
        return 0;
    }
  }
  void reset_high(cudaMemPoolAttr attribute) {
    const std::lock_guard lock(mutex_);
    if (attribute == cudaMemPoolAttrUsedMemHigh) {
      used_high_ = used_;
    } else if (attribute == cudaMemPoolAttrReservedMemHigh) {
      reserved_high_ = reserved_;
    }
  }

 private:
  static constexpr std::size_t kStep = std::size_t{32} << 20U;
  std::mutex mutex_;
  std::size_t used_ = 0, used_high_ = 0, reserved_ = 0, reserved_high_ = 0;
};

constexpr std::size_t kMostDevices = 64;
Pool pools[kMostDevices];

Pool& pool_of(cudaMemPool_t pool) { return *reinterpret_cast<Pool*>(pool); }

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(&pools[device]);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  if (attribute >= cudaMemPoolAttrReleaseThreshold) {
    *static_cast<std::uint64_t*>(value) = pool_of(pool).get(attribute);
  } else {
    *static_cast<int*>(value) = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute,
                                    void* /*value*/) {
  pool_of(pool).reset_high(attribute);
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t keep) {
  pool_of(pool).trim(keep);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** address, std::size_t size, cudaStream_t /*stream*/) {
  const cudaError_t error = cudaMalloc(address, size);
  if (error == cudaSuccess) {
    if (const auto range = machine().memory.find(*address)) {
      pools[range->device].add(size);
    }
  }
  return error;
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t /*stream*/) {
  if (const auto range = machine().memory.find(address)) {
    pools[range->device].remove(range->size);
  }
  return cudaFree(address);
}
}
