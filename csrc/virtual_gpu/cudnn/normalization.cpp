// SPDX-License-Identifier: Apache-2.0
// Batch norm of cuDNN takes memory of its own only for channels_last, where it sums in pieces.
#include <cudnn.h>

#include <cmath>

#include "virtual_gpu/cudnn/descriptors.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::described;
using virtual_gpu::element_size;
using virtual_gpu::TensorDescriptor;

namespace {

// Bytes for each pixel of a block of 64 channels, for each block, and once.
struct Law {
  double pixel;
  double block;
  double once;
};

// Fitted to benchmarks/virtual_gpu/workspaces.py on an H200, which has three shapes of each: equal
// there to the byte. Less than a megabyte each.
constexpr Law kForwardFloat = {8.0625, 520, 556};
constexpr Law kForwardHalf = {3.225, 269.4, 1219.6};
constexpr Law kBackward = {16.0 / 3, 491.7, 909.3};

std::size_t workspace(cudnnBatchNormMode_t mode, const TensorDescriptor& tensor, const Law& law) {
  if (mode != CUDNN_BATCHNORM_SPATIAL_PERSISTENT || tensor.dims.size() < 3) {
    return 0;
  }
  constexpr int kBlock = 64;
  double pixels = tensor.dims[0];
  for (std::size_t index = 2; index < tensor.dims.size(); ++index) {
    pixels *= tensor.dims[index];
  }
  const int blocks = (tensor.dims[1] + kBlock - 1) / kBlock;
  return static_cast<std::size_t>(
      std::lround((law.pixel * pixels + law.block) * blocks + law.once));
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t /*handle*/, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t /*operations*/,
    const cudnnTensorDescriptor_t input, const cudnnTensorDescriptor_t /*added*/,
    const cudnnTensorDescriptor_t /*output*/, const cudnnTensorDescriptor_t /*parameters*/,
    const cudnnActivationDescriptor_t /*activation*/, std::size_t* size) {
  const auto& tensor = described<TensorDescriptor>(input);
  *size = workspace(mode, tensor, element_size(tensor.type) == 2 ? kForwardHalf : kForwardFloat);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t /*handle*/, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t /*operations*/,
    const cudnnTensorDescriptor_t input, const cudnnTensorDescriptor_t /*output*/,
    const cudnnTensorDescriptor_t /*output_gradient*/, const cudnnTensorDescriptor_t /*added*/,
    const cudnnTensorDescriptor_t /*input_gradient*/, const cudnnTensorDescriptor_t /*parameters*/,
    const cudnnActivationDescriptor_t /*activation*/, std::size_t* size) {
  *size = workspace(mode, described<TensorDescriptor>(input), kBackward);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t /*handle*/, cudnnBatchNormMode_t /*mode*/, cudnnBatchNormOps_t /*operations*/,
    const cudnnActivationDescriptor_t /*activation*/, const cudnnTensorDescriptor_t /*input*/,
    std::size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}
}
