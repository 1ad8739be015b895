// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/cudnn/convolutions.h"

namespace opacus_memprof::virtual_gpu {
namespace {

std::vector<std::int64_t> numbers(const void* elements, std::int64_t count) {
  const auto* const first = static_cast<const std::int64_t*>(elements);
  return {first, first + count};
}

cudnnBackendDescriptor_t descriptor_at(const void* elements) {
  return *static_cast<const cudnnBackendDescriptor_t*>(elements);
}

}  // namespace

void Convolutions::read_tensor(Convolution& convolution, cudnnBackendDescriptor_t descriptor,
                               bool weight) const {
  const auto found = tensors_.find(descriptor);
  if (found == tensors_.end()) {
    return;
  }
  const Tensor& tensor = found->second;
  if (weight) {
    convolution.weight = tensor.dims;
    return;
  }
  convolution.input = tensor.dims;
  convolution.type = tensor.type;
  convolution.channels_last =
      tensor.dims.size() > 2 && tensor.dims[1] > 1 && tensor.strides.back() == tensor.dims[1];
}

void Convolutions::set(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                       cudnnBackendAttributeType_t /*type*/, std::int64_t count,
                       const void* elements) {
  if (count < 1 || elements == nullptr) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto operation = [&](Direction direction) -> Convolution& {
    auto& known = operations_[descriptor];
    if (known == nullptr) {
      known = std::make_shared<Convolution>();
    }
    known->direction = direction;
    return *known;
  };
  const auto geometry = [&](Direction direction) {
    const auto found = geometries_.find(descriptor_at(elements));
    if (found != geometries_.end()) {
      Convolution& known = operation(direction);
      known.stride = found->second.stride;
      known.padding = found->second.padding;
      known.dilation = found->second.dilation;
    }
  };
  const auto follow = [&] {
    const auto found = chosen_.find(descriptor_at(elements));
    if (found != chosen_.end()) {
      chosen_[descriptor] = found->second;
    }
  };
  switch (name) {
    case CUDNN_ATTR_TENSOR_DATA_TYPE:
      tensors_[descriptor].type = *static_cast<const cudnnDataType_t*>(elements);
      break;
    case CUDNN_ATTR_TENSOR_DIMENSIONS:
      tensors_[descriptor].dims = numbers(elements, count);
      break;
    case CUDNN_ATTR_TENSOR_STRIDES:
      tensors_[descriptor].strides = numbers(elements, count);
      break;
    case CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES:
      geometries_[descriptor].stride = numbers(elements, count);
      break;
    case CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS:
      geometries_[descriptor].padding = numbers(elements, count);
      break;
    case CUDNN_ATTR_CONVOLUTION_DILATIONS:
      geometries_[descriptor].dilation = numbers(elements, count);
      break;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC:
      return geometry(Direction::forward);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC:
      return geometry(Direction::data);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC:
      return geometry(Direction::filter);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X:
      return read_tensor(operation(Direction::forward), descriptor_at(elements), false);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W:
      return read_tensor(operation(Direction::forward), descriptor_at(elements), true);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX:
      return read_tensor(operation(Direction::data), descriptor_at(elements), false);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W:
      return read_tensor(operation(Direction::data), descriptor_at(elements), true);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X:
      return read_tensor(operation(Direction::filter), descriptor_at(elements), false);
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW:
      return read_tensor(operation(Direction::filter), descriptor_at(elements), true);
    case CUDNN_ATTR_OPERATIONGRAPH_OPS:
      if (count == 1) {  // what is fused with other operations has engines of its own
        const auto found = operations_.find(descriptor_at(elements));
        if (found != operations_.end()) {
          chosen_[descriptor].convolution = found->second;
        }
      }
      break;
    case CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH:
    case CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
      return follow();
    default:
      break;
  }
}

void Convolutions::choose(cudnnBackendDescriptor_t heuristic,
                          cudnnBackendDescriptor_t configuration, Multiply multiply,
                          const std::optional<Split>& split) {
  const std::lock_guard lock(mutex_);
  const auto found = chosen_.find(heuristic);
  if (found != chosen_.end()) {
    chosen_[configuration] = {found->second.convolution, multiply, split, true};
  }
}

void Convolutions::forget(cudnnBackendDescriptor_t descriptor) {
  const std::lock_guard lock(mutex_);
  tensors_.erase(descriptor);
  geometries_.erase(descriptor);
  operations_.erase(descriptor);
  chosen_.erase(descriptor);
}

std::int64_t Convolutions::workspace(cudnnBackendDescriptor_t plan, std::int64_t chosen,
                                     bool measured, std::int64_t multiprocessors) {
  const std::lock_guard lock(mutex_);
  const auto found = chosen_.find(plan);
  if (found == chosen_.end() || !found->second.first) {
    return chosen;
  }
  const Convolution& convolution = *found->second.convolution;
  const Multiply multiply = found->second.multiply;
  std::optional<Workspace> known;
  for (const Multiply possible : {Multiply::tensor_cores, Multiply::plain}) {
    if (measured && !known && (multiply == possible || multiply == Multiply::either)) {
      known = measured_workspace(convolution, possible, chosen);
    }
  }
  const Workspace workspace = known.value_or(Workspace{
      estimated_workspace(convolution, multiply, found->second.split, multiprocessors, chosen)});
  if (!workspace.measured) {
    estimated_.insert(description(convolution, multiply));
    largest_estimated_ = std::max(largest_estimated_, workspace.bytes);
  }
  return workspace.bytes;
}

std::pair<std::size_t, std::int64_t> Convolutions::estimated() const {
  const std::lock_guard lock(mutex_);
  return {estimated_.size(), largest_estimated_};
}

Convolutions& convolutions() {
  static auto* const only = new Convolutions;
  return *only;
}

}  // namespace opacus_memprof::virtual_gpu
