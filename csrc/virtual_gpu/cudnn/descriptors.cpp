// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/cudnn/descriptors.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::described;
using virtual_gpu::DropoutDescriptor;
using virtual_gpu::RecurrentDescriptor;
using virtual_gpu::SequenceDescriptor;
using virtual_gpu::TensorDescriptor;

namespace {

template <class Ours, class Theirs>
cudnnStatus_t create(Theirs* handle) {
  *handle = reinterpret_cast<Theirs>(new Ours);
  return CUDNN_STATUS_SUCCESS;
}

template <class Ours, class Theirs>
cudnnStatus_t destroy(Theirs handle) {
  delete reinterpret_cast<Ours*>(handle);
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* tensor) {
  return create<TensorDescriptor>(tensor);
}

cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t tensor) {
  return destroy<TensorDescriptor>(tensor);
}

cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t tensor, cudnnDataType_t type,
                                         int count, const int dims[], const int strides[]) {
  described<TensorDescriptor>(tensor) = {type, {dims, dims + count}, {strides, strides + count}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t tensor, int requested,
                                         cudnnDataType_t* type, int* count, int dims[],
                                         int strides[]) {
  const auto& descriptor = described<TensorDescriptor>(tensor);
  *type = descriptor.type;
  *count = static_cast<int>(descriptor.dims.size());
  for (int index = 0; index < requested && index < *count; ++index) {
    dims[index] = descriptor.dims[static_cast<std::size_t>(index)];
    strides[index] = descriptor.strides[static_cast<std::size_t>(index)];
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateDropoutDescriptor(cudnnDropoutDescriptor_t* dropout) {
  return create<DropoutDescriptor>(dropout);
}

cudnnStatus_t cudnnDestroyDropoutDescriptor(cudnnDropoutDescriptor_t dropout) {
  return destroy<DropoutDescriptor>(dropout);
}

cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t dropout, cudnnHandle_t /*handle*/,
                                        float probability, void* /*states*/, std::size_t /*size*/,
                                        unsigned long long /*seed*/) {
  described<DropoutDescriptor>(dropout).probability = probability;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t dropout, cudnnHandle_t handle,
                                            float probability, void* states, std::size_t size,
                                            unsigned long long seed) {
  return cudnnSetDropoutDescriptor(dropout, handle, probability, states, size, seed);
}

cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* recurrent) {
  return create<RecurrentDescriptor>(recurrent);
}

cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t recurrent) {
  return destroy<RecurrentDescriptor>(recurrent);
}

cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t recurrent, cudnnRNNAlgo_t algorithm,
                                       cudnnRNNMode_t mode, cudnnRNNBiasMode_t bias,
                                       cudnnDirectionMode_t direction,
                                       cudnnRNNInputMode_t /*input_mode*/, cudnnDataType_t type,
                                       cudnnDataType_t math, cudnnMathType_t /*math_type*/,
                                       std::int32_t input, std::int32_t hidden,
                                       std::int32_t projected, std::int32_t layers,
                                       cudnnDropoutDescriptor_t dropout, std::uint32_t flags) {
  const int directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1;
  const float probability =
      dropout == nullptr ? 0 : described<DropoutDescriptor>(dropout).probability;
  described<RecurrentDescriptor>(recurrent) = {algorithm, mode,   bias,        directions,
                                               type,      math,   input,       hidden,
                                               projected, layers, probability, flags};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t* sequence) {
  return create<SequenceDescriptor>(sequence);
}

cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t sequence) {
  return destroy<SequenceDescriptor>(sequence);
}

cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t sequence, cudnnDataType_t /*type*/,
                                        cudnnRNNDataLayout_t /*layout*/, int steps, int batch,
                                        int width, const int lengths[], void* /*padding*/) {
  std::int64_t total = 0;
  for (int index = 0; index < batch; ++index) {
    total += lengths[index];
  }
  described<SequenceDescriptor>(sequence) = {steps, batch, width, total};
  return CUDNN_STATUS_SUCCESS;
}
}
