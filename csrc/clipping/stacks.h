// SPDX-License-Identifier: Apache-2.0
// Small per-sample gradients on the CPU, and norms and clipped sums of many layers at once: a call
// into torch for each takes longer than the computation. On CUDA, kernels do the same
// (clipping/kernels/stacks.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace opacus_memprof::clipping {

// All tensors have one dtype, float32 or float64. Sums are accumulated in float64. Stacks are [N,
// ...], contiguous and not empty.

// Returns the squared norms of every stack[n], [stacks, N], in the dtype of the stacks.
at::Tensor squared_norms_cpu(const std::vector<at::Tensor>& stacks);

// Returns the norm of each tensor, [tensors], in float64. They are contiguous.
at::Tensor norms_cpu(const std::vector<at::Tensor>& tensors);

// Returns the sum of factors[n] stack[n] for each stack, in `dtype`. `factors` has the dtype of the
// stacks.
std::vector<at::Tensor> weighted_sums_cpu(const std::vector<at::Tensor>& stacks,
                                          const at::Tensor& factors, at::ScalarType dtype);

// Returns the per-sample gradients of a layer norm's weight and bias, [N, features] each, from its
// input and the gradient of its output, [N, T, features], both contiguous.
std::pair<at::Tensor, at::Tensor> layer_norm_gradients_cpu(const at::Tensor& input,
                                                           const at::Tensor& gradient, double eps);

// Returns left[n]^T right[n] for [N, T, rows] and [N, T, columns], which are the per-sample
// gradients of a linear layer's weight, and, where the gradient of its output, [N, T, outputs], is
// given, those of its bias, [N, outputs].
std::pair<at::Tensor, std::optional<at::Tensor>> linear_gradients_cpu(
    const at::Tensor& left, const at::Tensor& right, const std::optional<at::Tensor>& gradient);

// Returns the squared norms, [N], of an embedding's per-sample gradients, from its indices, [N, T]
// int64, and the gradient of its output, [N, T, features], both contiguous. The row at `padding`
// has no gradient.
at::Tensor embedding_squared_norms_cpu(const at::Tensor& indices, const at::Tensor& gradient,
                                       const std::optional<std::int64_t>& padding);

}  // namespace opacus_memprof::clipping
