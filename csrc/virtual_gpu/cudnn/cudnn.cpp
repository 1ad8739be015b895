// SPDX-License-Identifier: Apache-2.0
// libcudnn: handles, versions and the descriptors of the API before graphs. cudnn_graph.cpp has
// convolutions and attention, cudnn_recurrent.cpp has recurrent layers.
#include <cudnn.h>

#include "virtual_gpu/cudnn/library.h"
#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::machine;
using virtual_gpu::make_handle;

extern "C" {

std::size_t cudnnGetVersion() {
  static auto* const real = virtual_gpu::cudnn_function(&::cudnnGetVersion, "cudnnGetVersion");
  return real == nullptr ? CUDNN_VERSION : real();
}

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int* value) {
  return VIRTUAL_GPU_CUDNN(cudnnGetProperty, type, value);
}

const char* cudnnGetErrorString(cudnnStatus_t status) {
  static auto* const real =
      virtual_gpu::cudnn_function(&::cudnnGetErrorString, "cudnnGetErrorString");
  return real == nullptr ? "an error of the virtual GPU" : real(status);
}

void cudnnGetLastErrorString(char* message, std::size_t size) {
  static auto* const real =
      virtual_gpu::cudnn_function(&::cudnnGetLastErrorString, "cudnnGetLastErrorString");
  if (real != nullptr) {
    real(message, size);
  } else if (size > 0) {
    *message = '\0';
  }
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  machine().memory.create_cudnn_handle(virtual_gpu::current_device());
  make_handle(handle);
  return CUDNN_STATUS_SUCCESS;
}

// The state of a random generator (XORWOW, 24 bytes) for each thread that the GPU can hold.
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t /*handle*/, std::size_t* size) {
  constexpr std::size_t kState = 24;
  const auto& device = virtual_gpu::machine().devices.front();
  *size = static_cast<std::size_t>(device.multiprocessors) *
          static_cast<std::size_t>(device.threads_per_multiprocessor) * kState;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t /*handle*/, cudaStream_t* stream) {
  *stream = nullptr;
  return CUDNN_STATUS_SUCCESS;
}
}
