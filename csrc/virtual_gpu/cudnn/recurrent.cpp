// SPDX-License-Identifier: Apache-2.0
// LSTM, GRU and RNN of cuDNN: where the weights lie.
#include "virtual_gpu/cudnn/recurrent.h"

#include <cudnn.h>

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::described;
using virtual_gpu::element_size;
using virtual_gpu::gates;
using virtual_gpu::input_of;
using virtual_gpu::matrices_before;
using virtual_gpu::RecurrentDescriptor;
using virtual_gpu::SequenceDescriptor;
using virtual_gpu::TensorDescriptor;

namespace {

std::int64_t biases_of_a_gate(const RecurrentDescriptor& recurrent) {
  switch (recurrent.bias) {
    case CUDNN_RNN_NO_BIAS:
      return 0;
    case CUDNN_RNN_DOUBLE_BIAS:
      return 2;
    default:
      return 1;
  }
}

// Where something lies in the weights, in numbers, and its sizes.
struct Place {
  std::int64_t offset;
  std::int64_t rows;
  std::int64_t columns;
};

// All matrices come first, layer by layer: the input's, the state's, and the projection.
Place matrix(const RecurrentDescriptor& recurrent, std::int64_t layer, std::int64_t id) {
  const std::int64_t count = gates(recurrent);
  const std::int64_t input = input_of(recurrent, layer);
  const std::int64_t start = matrices_before(recurrent, layer);
  if (id < count) {
    return {start + id * recurrent.hidden * input, recurrent.hidden, input};
  }
  const std::int64_t states = start + count * recurrent.hidden * input;
  if (id < 2 * count) {
    return {states + (id - count) * recurrent.hidden * recurrent.projected, recurrent.hidden,
            recurrent.projected};
  }
  return {states + count * recurrent.hidden * recurrent.projected, recurrent.projected,
          recurrent.hidden};
}

// Then all biases, in the same order.
Place bias(const RecurrentDescriptor& recurrent, std::int64_t layer, std::int64_t id) {
  const std::int64_t start = matrices_before(recurrent, recurrent.layers * recurrent.directions);
  const std::int64_t before = layer * gates(recurrent) * biases_of_a_gate(recurrent);
  return {start + (before + id) * recurrent.hidden, recurrent.hidden, 1};
}

void place(const Place& found, const RecurrentDescriptor& recurrent, const void* weights,
           cudnnTensorDescriptor_t tensor, void** address) {
  const int rows = static_cast<int>(found.rows);
  const int columns = static_cast<int>(found.columns);
  described<TensorDescriptor>(tensor) = {
      recurrent.type, {1, rows, columns}, {rows * columns, columns, 1}};
  if (address != nullptr) {
    *address = const_cast<char*>(static_cast<const char*>(weights)) +
               found.offset * static_cast<std::int64_t>(element_size(recurrent.type));
  }
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t /*handle*/, cudnnRNNDescriptor_t descriptor,
                                         std::size_t* size) {
  const auto& recurrent = described<RecurrentDescriptor>(descriptor);
  const std::int64_t layers = recurrent.layers * recurrent.directions;
  const std::int64_t biases =
      layers * gates(recurrent) * biases_of_a_gate(recurrent) * recurrent.hidden;
  const std::int64_t numbers = matrices_before(recurrent, layers) + biases;
  *size = static_cast<std::size_t>(numbers) * element_size(recurrent.type);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t /*handle*/, cudnnRNNDescriptor_t descriptor,
                                      std::int32_t layer, std::size_t /*size*/, const void* weights,
                                      std::int32_t id, cudnnTensorDescriptor_t matrix_tensor,
                                      void** matrix_address, cudnnTensorDescriptor_t bias_tensor,
                                      void** bias_address) {
  const auto& recurrent = described<RecurrentDescriptor>(descriptor);
  if (matrix_tensor != nullptr) {
    place(matrix(recurrent, layer, id), recurrent, weights, matrix_tensor, matrix_address);
  }
  if (bias_tensor != nullptr) {
    place(bias(recurrent, layer, id), recurrent, weights, bias_tensor, bias_address);
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t /*handle*/, cudnnRNNDescriptor_t descriptor,
                                        cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t input,
                                        std::size_t* workspace, std::size_t* reserve) {
  const auto& recurrent = described<RecurrentDescriptor>(descriptor);
  const auto& sequence = described<SequenceDescriptor>(input);
  const bool training = mode == CUDNN_FWD_MODE_TRAINING;
  *workspace =
      static_cast<std::size_t>(virtual_gpu::recurrent_workspace(recurrent, sequence, training));
  if (reserve != nullptr) {
    *reserve = training
                   ? static_cast<std::size_t>(virtual_gpu::recurrent_reserve(recurrent, sequence))
                   : 0;
  }
  return CUDNN_STATUS_SUCCESS;
}
}
