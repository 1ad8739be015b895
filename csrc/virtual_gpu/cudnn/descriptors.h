// SPDX-License-Identifier: Apache-2.0
// What the descriptors of cuDNN's API before graphs say. They are plain objects of the heap: their
// owner, who makes and destroys them, uses each from one thread at a time.
#pragma once

#include <cudnn.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace opacus_memprof::virtual_gpu {

struct TensorDescriptor {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::vector<int> dims;
  std::vector<int> strides;
};

struct DropoutDescriptor {
  float probability = 0;
};

struct RecurrentDescriptor {
  cudnnRNNAlgo_t algorithm = CUDNN_RNN_ALGO_STANDARD;
  cudnnRNNMode_t mode = CUDNN_LSTM;
  cudnnRNNBiasMode_t bias = CUDNN_RNN_DOUBLE_BIAS;
  int directions = 1;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  cudnnDataType_t math = CUDNN_DATA_FLOAT;
  std::int64_t input = 0;
  std::int64_t hidden = 0;
  std::int64_t projected = 0;  // as wide as hidden where there is no projection
  std::int64_t layers = 1;
  float dropout = 0;
  std::uint32_t flags = 0;
};

struct SequenceDescriptor {
  std::int64_t steps = 0;
  std::int64_t batch = 0;
  std::int64_t width = 0;
  std::int64_t lengths = 0;  // of all sequences together
};

template <class Ours, class Theirs>
Ours& described(Theirs handle) {
  return *reinterpret_cast<Ours*>(const_cast<void*>(static_cast<const void*>(handle)));
}

inline std::size_t element_size(cudnnDataType_t type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE:
      return 8;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    default:
      return 4;
  }
}

}  // namespace opacus_memprof::virtual_gpu
