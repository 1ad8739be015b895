// SPDX-License-Identifier: Apache-2.0
#include "clipping/convolution.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace opacus_memprof::clipping {

namespace {

using Sizes = std::vector<std::int64_t>;

// Returns x with zeros around it. constant_pad_nd does the same, with five times as many
// operations.
at::Tensor padded(const at::Tensor& x, at::IntArrayRef pads) {
  Sizes sizes = x.sizes().vec();
  std::int64_t first = 0;  // index of the first element of x in the result
  Sizes strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    const std::size_t pair = 2 * (sizes.size() - 1 - i);
    strides[i] = stride;
    if (pair < pads.size()) {
      first += pads[pair] * stride;
      sizes[i] += pads[pair] + pads[pair + 1];
    }
    stride *= sizes[i];
  }
  at::Tensor result = at::zeros(sizes, x.options());
  result.as_strided(x.sizes(), strides, first).copy_(x);
  return result;
}

}  // namespace

at::Tensor unfold(const at::Tensor& input, at::IntArrayRef pads, at::IntArrayRef kernel,
                  at::IntArrayRef stride, at::IntArrayRef dilation) {
  TORCH_CHECK(input.dim() == static_cast<std::int64_t>(kernel.size()) + 2 &&
                  stride.size() == kernel.size() && dilation.size() == kernel.size() &&
                  pads.size() <= 2 * kernel.size() && pads.size() % 2 == 0,
              "kernel, stride, dilation and pads must be of the input's dimensions");
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    TORCH_CHECK(kernel[i] > 0 && stride[i] > 0 && dilation[i] > 0,
                "kernel, stride and dilation must be positive");
  }
  const bool is_padded = std::ranges::any_of(pads, [](std::int64_t each) { return each != 0; });
  const at::Tensor x = is_padded ? padded(input, pads) : input;
  Sizes sizes{x.size(0), x.size(1)};
  Sizes strides{x.stride(0), x.stride(1)};
  Sizes matrix{x.size(0), x.size(1), 1};
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    sizes.push_back(kernel[i]);
    strides.push_back(dilation[i] * x.stride(static_cast<std::int64_t>(i) + 2));
    matrix[1] *= kernel[i];
  }
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    const auto dimension = static_cast<std::int64_t>(i) + 2;
    const std::int64_t reach = dilation[i] * (kernel[i] - 1);
    TORCH_CHECK(x.size(dimension) > reach, "the kernel is larger than the padded input");
    sizes.push_back((x.size(dimension) - reach - 1) / stride[i] + 1);
    strides.push_back(stride[i] * x.stride(dimension));
    matrix[2] *= sizes.back();
  }
  if (const auto viewed = at::detail::computeStride(sizes, strides, matrix))
    return x.as_strided(matrix, *viewed);
  at::Tensor result = at::empty(matrix, x.options());
  result.view(sizes).copy_(x.as_strided(sizes, strides));
  return result;
}

}  // namespace opacus_memprof::clipping
