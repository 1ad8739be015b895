// SPDX-License-Identifier: Apache-2.0
// libcudnn: descriptors that say as much as torch's front end asks of them.
#include <cudnn.h>
#include <cudnn_backend.h>

#include <cstring>

#include "virtual_gpu/machine.h"

using virtual_gpu::make_handle;

extern "C" {

std::size_t cudnnGetVersion() { return CUDNN_VERSION; }

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int* value) {
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "success" : "an error of the virtual GPU";
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  make_handle(handle);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t /*type*/,
                                           cudnnBackendDescriptor_t* descriptor) {
  make_handle(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t /*descriptor*/,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t requested,
                                       std::int64_t* count, void* elements) {
  std::int64_t there = requested > 0 ? 1 : 0;
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE ||
      name == CUDNN_ATTR_ENGINECFG_ENGINE) {
    there = 1;
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION) {
    there = 3;
    if (elements != nullptr && requested >= 3) {
      std::memcpy(elements, "{}", 3);
    }
  } else if (elements != nullptr && requested > 0 && type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    const bool wide = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_DOUBLE ||
                      type == CUDNN_TYPE_VOID_PTR;
    std::memset(elements, 0, wide ? 8 : 4);
  }
  if (count != nullptr) {
    *count = there;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t /*handle*/, std::size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* descriptor) {
  make_handle(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateDropoutDescriptor(cudnnDropoutDescriptor_t* descriptor) {
  make_handle(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t /*handle*/, cudaStream_t* stream) {
  *stream = nullptr;
  return CUDNN_STATUS_SUCCESS;
}
}
