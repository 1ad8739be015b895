// SPDX-License-Identifier: Apache-2.0
// cuDNN's graphs: descriptors, engines and plans are the real library's, made for the virtual GPU.
// Only to execute a plan does nothing.
#include <cudnn.h>
#include <cudnn_backend.h>

#include <cstdint>

#include "virtual_gpu/cudnn_library.h"

namespace {

// For which descriptors the GPU must be named in place of a handle, by the attribute that each of
// them is given.
cudnnBackendAttributeName_t device_attribute(cudnnBackendAttributeName_t given) {
  switch (given) {
    case CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH:
      return static_cast<cudnnBackendAttributeName_t>(204);  // CUDNN_ATTR_ENGINEHEUR_DEVICEPROP
    case CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
    case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION:
      return static_cast<cudnnBackendAttributeName_t>(407);  // CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP
    case CUDNN_ATTR_ENGINE_OPERATION_GRAPH:
      return static_cast<cudnnBackendAttributeName_t>(1307);  // CUDNN_ATTR_ENGINE_DEVICEPROP
    default:
      return static_cast<cudnnBackendAttributeName_t>(-1);
  }
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  return VIRTUAL_GPU_CUDNN(cudnnBackendCreateDescriptor, type, descriptor);
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  return VIRTUAL_GPU_CUDNN(cudnnBackendDestroyDescriptor, descriptor);
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       const void* elements) {
  if (type == CUDNN_TYPE_HANDLE) {
    return CUDNN_STATUS_SUCCESS;  // handles are ours, and mean the GPU that is named below
  }
  const auto attribute = device_attribute(name);
  if (static_cast<int>(attribute) >= 0) {
    auto device = virtual_gpu::cudnn_device();
    const cudnnStatus_t status = VIRTUAL_GPU_CUDNN(cudnnBackendSetAttribute, descriptor, attribute,
                                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    if (status != CUDNN_STATUS_SUCCESS) {
      return status;
    }
  }
  return VIRTUAL_GPU_CUDNN(cudnnBackendSetAttribute, descriptor, name, type, count, elements);
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t requested,
                                       std::int64_t* count, void* elements) {
  return VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, descriptor, name, type, requested, count,
                           elements);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  return VIRTUAL_GPU_CUDNN(cudnnBackendFinalize, descriptor);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t /*handle*/, cudnnBackendDescriptor_t /*plan*/,
                                  cudnnBackendDescriptor_t /*variant*/) {
  return CUDNN_STATUS_SUCCESS;
}
}
