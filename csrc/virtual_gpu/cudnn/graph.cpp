// SPDX-License-Identifier: Apache-2.0
// cuDNN's graphs: descriptors, engines and plans are the real library's, made for the virtual GPU.
// Only to execute a plan does nothing.
#include <cudnn.h>
#include <cudnn_backend.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>

#include "virtual_gpu/cudnn/convolutions.h"
#include "virtual_gpu/cudnn/library.h"
#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

namespace {

constexpr int kMeasuredMajor = 9;  // compute capability of the GPU that the table is of

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

bool multiplies_with_tensor_cores(cudnnBackendDescriptor_t configuration) {
  cudnnBackendDescriptor_t engine = nullptr;
  std::int64_t count = 0;
  VIRTUAL_GPU_CUDNN(cudnnBackendCreateDescriptor, CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine);
  VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, configuration, CUDNN_ATTR_ENGINECFG_ENGINE,
                    CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine);
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  count = 0;
  VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                    CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes);
  VIRTUAL_GPU_CUDNN(cudnnBackendDestroyDescriptor, engine);
  return std::any_of(notes, notes + count, [](cudnnBackendNumericalNote_t note) {
    return note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE ||
           note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS;
  });
}

// Nothing for an engine that does not split sums so, or is told not to.
std::optional<virtual_gpu::Split> split_of(cudnnBackendDescriptor_t configuration) {
  std::array<cudnnBackendDescriptor_t, 16> choices{};
  for (auto& choice : choices) {
    VIRTUAL_GPU_CUDNN(cudnnBackendCreateDescriptor, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, &choice);
  }
  std::int64_t count = 0;
  VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, configuration, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                    CUDNN_TYPE_BACKEND_DESCRIPTOR, std::ssize(choices), &count, choices.data());
  count = std::min(count, std::ssize(choices));
  virtual_gpu::Split split;
  bool splits = false;
  for (auto& choice : choices) {
    cudnnBackendKnobType_t knob{};
    std::int64_t value = 0;
    std::int64_t given = 0;
    if (&choice - choices.data() < count) {
      VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, choice, CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                        CUDNN_TYPE_KNOB_TYPE, 1, &given, &knob);
      VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, choice, CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE,
                        CUDNN_TYPE_INT64, 1, &given, &value);
      splits = splits || (knob == CUDNN_KNOB_TYPE_WORKSPACE && value == 0);
      split.tile = knob == CUDNN_KNOB_TYPE_TILE_SIZE ? value : split.tile;
      split.rows = knob == CUDNN_KNOB_TYPE_TILE_CGA_M ? value : split.rows;
      split.columns = knob == CUDNN_KNOB_TYPE_TILE_CGA_N ? value : split.columns;
    }
    VIRTUAL_GPU_CUDNN(cudnnBackendDestroyDescriptor, choice);
  }
  return splits ? std::optional(split) : std::nullopt;
}

// torch takes the first engine or, for fp32 without TF32, the first that multiplies plainly.
void choose_first(cudnnBackendDescriptor_t heuristic,
                  const cudnnBackendDescriptor_t* configurations, std::int64_t count) {
  using virtual_gpu::Multiply;
  const auto choose = [&](cudnnBackendDescriptor_t configuration, Multiply multiply) {
    virtual_gpu::convolutions().choose(heuristic, configuration, multiply, split_of(configuration));
  };
  if (count < 1) {
    return;
  }
  if (!multiplies_with_tensor_cores(configurations[0])) {
    choose(configurations[0], Multiply::either);
    return;
  }
  choose(configurations[0], Multiply::tensor_cores);
  for (std::int64_t index = 1; index < count; ++index) {
    if (!multiplies_with_tensor_cores(configurations[index])) {
      choose(configurations[index], Multiply::plain);
      return;
    }
  }
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  return VIRTUAL_GPU_CUDNN(cudnnBackendCreateDescriptor, type, descriptor);
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  virtual_gpu::convolutions().forget(descriptor);
  return VIRTUAL_GPU_CUDNN(cudnnBackendDestroyDescriptor, descriptor);
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       const void* elements) {
  if (type == CUDNN_TYPE_HANDLE) {
    return CUDNN_STATUS_SUCCESS;  // handles are ours, and mean the GPU that is named below
  }
  virtual_gpu::convolutions().set(descriptor, name, type, count, elements);
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
  const cudnnStatus_t status = VIRTUAL_GPU_CUDNN(cudnnBackendGetAttribute, descriptor, name, type,
                                                 requested, count, elements);
  if (status == CUDNN_STATUS_SUCCESS && elements != nullptr && requested > 0) {
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
      choose_first(descriptor, static_cast<const cudnnBackendDescriptor_t*>(elements),
                   std::min(*count, requested));
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
      auto& bytes = *static_cast<std::int64_t*>(elements);
      const auto& device = virtual_gpu::machine().devices.front();
      bytes = virtual_gpu::convolutions().workspace(
          descriptor, bytes, device.major == kMeasuredMajor, device.multiprocessors);
    }
  }
  return status;
}

// The number of convolutions whose workspace is estimated, and the bytes of the largest.
std::size_t memprof_virtual_gpu_estimated_workspaces(std::int64_t* largest) {
  const auto [count, bytes] = virtual_gpu::convolutions().estimated();
  *largest = bytes;
  return count;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  return VIRTUAL_GPU_CUDNN(cudnnBackendFinalize, descriptor);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t /*handle*/, cudnnBackendDescriptor_t /*plan*/,
                                  cudnnBackendDescriptor_t /*variant*/) {
  return CUDNN_STATUS_SUCCESS;
}
}
