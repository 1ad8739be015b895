// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "virtual_gpu/cudnn_convolutions.h"

namespace virtual_gpu {
namespace {

struct Row {
  std::string_view convolution;
  std::int64_t bytes;
};

// In the order of their first fields.
constexpr Row kMeasured[] = {
#include "virtual_gpu/cudnn_workspaces.inc"
};

void append(std::string& key, const std::vector<std::int64_t>& numbers) {
  for (std::size_t index = 0; index < numbers.size(); ++index) {
    key += std::to_string(numbers[index]);
    key += index + 1 < numbers.size() ? 'x' : ' ';
  }
}

const char* type_name(cudnnDataType_t type, Multiply multiply) {
  switch (type) {
    case CUDNN_DATA_HALF:
      return "fp16";
    case CUDNN_DATA_BFLOAT16:
      return "bf16";
    case CUDNN_DATA_FLOAT:
      return multiply == Multiply::tensor_cores ? "tf32" : "fp32";
    default:
      return "other";
  }
}

std::string key_of(const Convolution& convolution, Multiply multiply) {
  std::string key;
  append(key, convolution.input);
  append(key, convolution.weight);
  append(key, convolution.stride);
  append(key, convolution.padding);
  append(key, convolution.dilation);
  key += type_name(convolution.type, multiply);
  key += convolution.channels_last ? " last " : " first ";
  key += static_cast<char>(convolution.direction);
  return key;
}

bool all(const std::vector<std::int64_t>& numbers, std::size_t from, std::int64_t value) {
  return std::all_of(numbers.begin() + static_cast<std::ptrdiff_t>(from), numbers.end(),
                     [value](std::int64_t number) { return number == value; });
}

}  // namespace

std::optional<std::int64_t> measured_workspace(const Convolution& convolution, Multiply multiply) {
  const std::string key = key_of(convolution, multiply);
  const auto* const found = std::lower_bound(std::begin(kMeasured), std::end(kMeasured), key,
                                             [](const Row& row, const std::string& wanted) {
                                               return row.convolution < std::string_view(wanted);
                                             });
  if (found == std::end(kMeasured) || found->convolution != key) {
    return std::nullopt;
  }
  return found->bytes;
}

// A convolution with kernels of one element over planes is a product of matrices for each sample,
// which cuBLASLt does in place where a plane is large and aligned well enough; the gradient of the
// weights is summed over the samples in fp32. Without a GPU cuDNN does not ask cuBLASLt and chooses
// an engine that transposes all tensors first. Of the products measured the rule holds for nine in
// ten.
std::int64_t estimated_workspace(const Convolution& convolution, Multiply multiply,
                                 std::int64_t chosen) {
  constexpr std::int64_t kAligned = 8;  // bytes
  constexpr std::int64_t kLarge = 64;   // numbers
  const bool product = all(convolution.weight, 2, 1) && all(convolution.stride, 0, 1) &&
                       all(convolution.padding, 0, 0) &&
                       convolution.input[1] == convolution.weight[1];
  if (multiply != Multiply::tensor_cores || !product || convolution.channels_last) {
    return chosen;
  }
  std::int64_t plane = 1;
  for (std::size_t index = 2; index < convolution.input.size(); ++index) {
    plane *= convolution.input[index];
  }
  const bool wide = convolution.type == CUDNN_DATA_FLOAT;
  if (plane * (wide ? 4 : 2) % kAligned != 0) {
    const bool in_place = convolution.direction == Direction::data ||
                          (wide && convolution.direction == Direction::forward);
    return in_place ? 0 : chosen;
  }
  if (plane < kLarge) {
    return chosen;
  }
  if (convolution.direction != Direction::filter) {
    return 0;
  }
  constexpr std::int64_t kSum = 4;  // bytes of a number of fp32
  return convolution.input[0] * convolution.weight[0] * convolution.weight[1] * kSum;
}

}  // namespace virtual_gpu
