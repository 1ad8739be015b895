// SPDX-License-Identifier: Apache-2.0
// LSTM, GRU and RNN of cuDNN: where the weights lie, and how much memory they take.
#include <cudnn.h>

#include "virtual_gpu/cudnn_descriptors.h"

using virtual_gpu::described;
using virtual_gpu::element_size;
using virtual_gpu::RecurrentDescriptor;
using virtual_gpu::SequenceDescriptor;
using virtual_gpu::TensorDescriptor;

namespace {

std::int64_t gates(const RecurrentDescriptor& recurrent) {
  switch (recurrent.mode) {
    case CUDNN_LSTM:
      return 4;
    case CUDNN_GRU:
      return 3;
    default:
      return 1;
  }
}

bool projects(const RecurrentDescriptor& recurrent) {
  return recurrent.projected != recurrent.hidden;
}

std::int64_t input_of(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer) {
  return pseudo_layer < recurrent.directions ? recurrent.input
                                             : recurrent.projected * recurrent.directions;
}

// Numbers in the matrices of one layer in one direction.
std::int64_t matrices_of(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer) {
  const std::int64_t per_gate =
      recurrent.hidden * (input_of(recurrent, pseudo_layer) + recurrent.projected);
  return gates(recurrent) * per_gate +
         (projects(recurrent) ? recurrent.hidden * recurrent.projected : 0);
}

// In front of a layer's; of all layers if it is their number.
std::int64_t matrices_before(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer) {
  std::int64_t total = 0;
  for (std::int64_t layer = 0; layer < pseudo_layer; ++layer) {
    total += matrices_of(recurrent, layer);
  }
  return total;
}

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

// All matrices come first, layer by layer: those that the input meets, those that the state meets,
// the projection.
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

std::int64_t rounded(std::int64_t bytes) {
  constexpr std::int64_t kPiece = 32;
  return (bytes + kPiece - 1) / kPiece * kPiece;
}

// What forward keeps for backward: of each layer gates and states, what goes from layer to layer,
// the masks of dropout (one bit a number), and with a projection what it has made of the states.
// Equal to the byte in all 468 cases that benchmarks/virtual_gpu_workspaces.py measures on an H200.
std::int64_t reserve_of(const RecurrentDescriptor& recurrent, const SequenceDescriptor& sequence) {
  constexpr std::int64_t kHeader = 256;
  const auto size = static_cast<std::int64_t>(element_size(recurrent.type));
  const std::int64_t steps = sequence.steps * sequence.batch * recurrent.directions;
  const std::int64_t states = steps * recurrent.hidden;
  std::int64_t kept = 1;
  if (recurrent.mode == CUDNN_LSTM) {
    kept = 5;
  } else if (recurrent.mode == CUDNN_GRU) {
    kept = 6;
  }
  const std::int64_t between = recurrent.layers - 1;
  std::int64_t total = kHeader + rounded(recurrent.layers * kept * states * size) +
                       rounded(between * steps * recurrent.projected * size);
  if (recurrent.dropout > 0) {
    total += rounded(between * ((states + 7) / 8));
  }
  if (projects(recurrent)) {
    total += rounded(recurrent.layers * states * size) +
             rounded(recurrent.layers * steps * recurrent.projected * size);
  }
  return total;
}

// What a call takes and gives back: cuBLAS's share for each layer, which runs on a stream of its
// own, and buffers by width. Of the same 468 cases half are within 4 %, all within a factor of 2.6.
std::int64_t workspace_of(const RecurrentDescriptor& recurrent,
                          const SequenceDescriptor& sequence) {
  constexpr std::int64_t kStream = std::int64_t{8} << 20U;
  constexpr std::int64_t kWide = 512;  // from here on other kernels, which need less
  const std::int64_t steps = sequence.steps * sequence.batch;
  const std::int64_t layers = recurrent.layers * recurrent.directions;
  std::int64_t numbers = 0;
  if (projects(recurrent)) {
    const std::int64_t tenths = recurrent.hidden < kWide ? 60 : 49;
    numbers = steps * (tenths * recurrent.hidden / 10 + 3 * sequence.width);
  } else {
    std::int64_t tenths = 45;
    if (recurrent.hidden < kWide) {
      tenths = recurrent.mode == CUDNN_LSTM ? 190 : recurrent.mode == CUDNN_GRU ? 170 : 130;
    }
    const std::int64_t inputs = recurrent.hidden < kWide ? 3 : 2;
    numbers =
        recurrent.directions * steps * (tenths * recurrent.hidden / 10 + inputs * sequence.width) +
        2 * gates(recurrent) * layers * recurrent.hidden * recurrent.hidden;
  }
  return kStream * layers + numbers * static_cast<std::int64_t>(element_size(recurrent.type));
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
  *workspace = static_cast<std::size_t>(workspace_of(recurrent, sequence));
  if (reserve != nullptr) {
    const bool training = mode == CUDNN_FWD_MODE_TRAINING;
    *reserve = training ? static_cast<std::size_t>(reserve_of(recurrent, sequence)) : 0;
  }
  return CUDNN_STATUS_SUCCESS;
}
}
