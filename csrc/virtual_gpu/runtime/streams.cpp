// SPDX-License-Identifier: Apache-2.0
// libcudart: streams, events and CUDA graphs.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <utility>

#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/runtime/status.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::current_device;
using virtual_gpu::fail;
using virtual_gpu::Handle;
using virtual_gpu::machine;
using virtual_gpu::ready;

namespace {

Handle handle(const void* object) { return reinterpret_cast<Handle>(object); }

template <class T>
T object(Handle handle) {
  return reinterpret_cast<T>(handle);  // NOLINT(performance-no-int-to-ptr)
}

cudaStreamCaptureStatus capture_status(const std::optional<virtual_gpu::Capture>& capture) {
  if (!capture) {
    return cudaStreamCaptureStatusNone;
  }
  return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t begin_capture(cudaStream_t stream, Handle graph, cudaStreamCaptureMode mode) {
  return machine().streams.begin_capture(handle(stream),
                                         static_cast<virtual_gpu::CaptureMode>(mode), graph)
             ? cudaSuccess
             : fail(cudaErrorStreamCaptureUnsupported);
}

static_assert(static_cast<int>(virtual_gpu::CaptureMode::global) == cudaStreamCaptureModeGlobal);
static_assert(static_cast<int>(virtual_gpu::CaptureMode::thread_local_) ==
              cudaStreamCaptureModeThreadLocal);
static_assert(static_cast<int>(virtual_gpu::CaptureMode::relaxed) == cudaStreamCaptureModeRelaxed);

}  // namespace

extern "C" {

// --- streams ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int priority) {
  if (const cudaError_t error = ready()) {
    return error;
  }
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

// Everything is done when it is asked for. A captured stream never runs, and cannot be waited for.
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return machine().streams.forbid_waiting(handle(stream)) ? fail(cudaErrorStreamCaptureUnsupported)
                                                          : ready();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

cudaError_t cudaDeviceSynchronize() {
  return machine().streams.forbid_waiting_for_all() ? fail(cudaErrorStreamCaptureUnsupported)
                                                    : ready();
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = machine().streams.device(handle(stream), current_device());
  return cudaSuccess;
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
  machine().streams.launch(handle(stream), [=] { function(data); });
  return cudaSuccess;
}

// --- events ---

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = object<cudaEvent_t>(machine().streams.create_event());
  return ready();
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
  return ready();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return machine().streams.captured_event(handle(event)) ? fail(cudaErrorCapturedEvent)
                                                         : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const auto passed = machine().streams.milliseconds(handle(begin), handle(end));
  *milliseconds = static_cast<float>(passed.value_or(0));
  return passed ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

// --- captures and graphs ---

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return begin_capture(stream, 0, mode);
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t* /*dependencies*/,
                                          const cudaGraphEdgeData* /*data*/, std::size_t /*count*/,
                                          cudaStreamCaptureMode mode) {
  return begin_capture(stream, handle(graph), mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Handle captured = 0;
  const auto end = machine().streams.end_capture(handle(stream), &captured);
  *graph = object<cudaGraph_t>(captured);
  switch (end) {
    case virtual_gpu::CaptureEnd::complete:
      return cudaSuccess;
    case virtual_gpu::CaptureEnd::unmatched:
      return fail(cudaErrorStreamCaptureUnmatched);
    case virtual_gpu::CaptureEnd::unjoined:
      return fail(cudaErrorStreamCaptureUnjoined);
    case virtual_gpu::CaptureEnd::invalid:
      return fail(cudaErrorStreamCaptureInvalidated);
  }
  return fail(cudaErrorUnknown);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = capture_status(machine().streams.capture(handle(stream)));
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
  *status = capture_status(capture);
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

// What the kernels of a graph are is not known.
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned /*flags*/) {
  std::ofstream file(path);
  file << "digraph {\nlabel=\"a virtual GPU does not know what the nodes of a graph are\";\n";
  for (std::size_t node = 0; node < machine().streams.nodes(handle(graph)); ++node) {
    file << "node_" << node << ";\n";
  }
  file << "}\n";
  return file.flush() ? cudaSuccess : fail(cudaErrorOperatingSystem);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long /*flags*/) {
  *executable = object<cudaGraphExec_t>(machine().streams.instantiate(handle(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  machine().streams.replay(handle(executable), handle(stream));
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  machine().streams.destroy_executable(handle(executable));
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
