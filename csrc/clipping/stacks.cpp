// SPDX-License-Identifier: Apache-2.0
#include "clipping/stacks.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "clipping/step.h"

namespace opacus_memprof::clipping {

namespace {

constexpr std::int64_t kMostOfOneThread = 1 << 16;  // numbers; torch shares more among threads

// Returns the sum of function(number) over all numbers.
template <typename T, typename Function>
double sum_of(std::span<const T> numbers, const Function& function) {
  constexpr std::size_t kParts = 8;  // independent partial sums
  std::array<double, kParts> parts{};
  const std::size_t whole = numbers.size() / kParts * kParts;
  for (std::size_t i = 0; i < whole; i += kParts) {
    for (std::size_t j = 0; j < kParts; ++j)
      parts[j] += function(static_cast<double>(numbers[i + j]));
  }
  double total = 0;
  for (const double part : parts) total += part;
  for (const T rest : numbers.subspan(whole)) total += function(static_cast<double>(rest));
  return total;
}

double square(double number) { return number * number; }

// The sum of factors[n] times the n-th row of `size` numbers.
template <typename T>
void find_weighted_sum(const T* numbers, std::size_t size, std::span<const T> factors, T* total) {
  constexpr std::size_t kBlock = 512;  // numbers that are added up in the cache
  for (std::size_t start = 0; start < size; start += kBlock) {
    std::array<double, kBlock> sums{};
    const std::size_t count = std::min(kBlock, size - start);
    for (std::size_t n = 0; n < factors.size(); ++n) {
      const auto factor = static_cast<double>(factors[n]);
      const T* const row = numbers + n * size + start;
      for (std::size_t i = 0; i < count; ++i) sums[i] += factor * static_cast<double>(row[i]);
    }
    for (std::size_t i = 0; i < count; ++i) total[start + i] = static_cast<T>(sums[i]);
  }
}

// For one sample, [T, features].
template <typename T>
void find_layer_norm_gradients(std::span<const T> input, std::span<const T> gradient, double eps,
                               std::span<T> of_weight, std::span<T> of_bias) {
  const std::size_t features = of_weight.size();
  std::vector<double> weight(features);
  std::vector<double> bias(features);
  for (std::size_t start = 0; start < input.size(); start += features) {
    const auto token = input.subspan(start, features);
    const auto own = gradient.subspan(start, features);
    const double mean = sum_of(token, [](double x) { return x; }) / static_cast<double>(features);
    const double variance = sum_of(token, [mean](double x) { return square(x - mean); }) /
                            static_cast<double>(features);
    const double scale = 1 / std::sqrt(variance + eps);
    for (std::size_t i = 0; i < features; ++i) {
      const auto each = static_cast<double>(own[i]);
      weight[i] += each * ((static_cast<double>(token[i]) - mean) * scale);
      bias[i] += each;
    }
  }
  for (std::size_t i = 0; i < features; ++i) {
    of_weight[i] = static_cast<T>(weight[i]);
    of_bias[i] = static_cast<T>(bias[i]);
  }
}

bool is_on_cpu(const at::Tensor& x, at::ScalarType dtype) {
  return x.is_cpu() && x.is_contiguous() && x.scalar_type() == dtype;
}

// Returns the number of samples, which is the size of the first dimension of every stack.
std::int64_t check_stacks(const std::vector<at::Tensor>& stacks) {
  TORCH_CHECK(!stacks.empty() && stacks[0].dim() > 0, "stacks must have a dimension of samples");
  const std::int64_t samples = stacks[0].size(0);
  for (const at::Tensor& stack : stacks) {
    TORCH_CHECK(
        is_on_cpu(stack, stacks[0].scalar_type()) && stack.dim() > 0 && stack.size(0) == samples,
        "stacks must be contiguous CPU tensors of one dtype with ", samples, " samples");
  }
  return samples;
}

}  // namespace

at::Tensor squared_norms_cpu(const std::vector<at::Tensor>& stacks) {
  const std::int64_t samples = check_stacks(stacks);
  at::Tensor found =
      at::empty({static_cast<std::int64_t>(stacks.size()), samples}, stacks[0].options());
  AT_DISPATCH_FLOATING_TYPES(found.scalar_type(), "squared_norms_cpu", [&] {
    auto* next = found.mutable_data_ptr<scalar_t>();
    for (const at::Tensor& stack : stacks) {
      const auto size = static_cast<std::size_t>(samples == 0 ? 0 : stack.numel() / samples);
      const scalar_t* sample = stack.const_data_ptr<scalar_t>();
      for (std::int64_t n = 0; n < samples; ++n, sample += size)
        *next++ = static_cast<scalar_t>(sum_of<scalar_t>({sample, size}, square));
    }
  });
  return found;
}

at::Tensor norms_cpu(const std::vector<at::Tensor>& tensors) {
  at::Tensor found = at::empty({static_cast<std::int64_t>(tensors.size())}, at::kDouble);
  auto* next = found.mutable_data_ptr<double>();
  for (const at::Tensor& each : tensors) {
    TORCH_CHECK(is_on_cpu(each, each.scalar_type()), "tensors must be contiguous, on the CPU");
    if (each.numel() > kMostOfOneThread) {
      *next++ = at::linalg_vector_norm(each).item<double>();
      continue;
    }
    AT_DISPATCH_FLOATING_TYPES(each.scalar_type(), "norms_cpu", [&] {
      const std::span<const scalar_t> numbers(each.const_data_ptr<scalar_t>(),
                                              static_cast<std::size_t>(each.numel()));
      *next++ = std::sqrt(sum_of<scalar_t>(numbers, square));
    });
  }
  return found;
}

std::vector<at::Tensor> weighted_sums_cpu(const std::vector<at::Tensor>& stacks,
                                          const at::Tensor& factors, at::ScalarType dtype) {
  const std::int64_t samples = check_stacks(stacks);
  TORCH_CHECK(is_on_cpu(factors, stacks[0].scalar_type()) && factors.numel() == samples,
              "factors must be a contiguous CPU tensor of the stacks' dtype, one for each of ",
              samples, " samples");
  const at::ScalarType own = stacks.at(0).scalar_type();
  std::vector<at::Tensor> totals = empty_sums(stacks, own);
  AT_DISPATCH_FLOATING_TYPES(own, "weighted_sums_cpu", [&] {
    const std::span<const scalar_t> weights(factors.const_data_ptr<scalar_t>(),
                                            static_cast<std::size_t>(factors.numel()));
    for (std::size_t i = 0; i < stacks.size(); ++i)
      find_weighted_sum(stacks[i].const_data_ptr<scalar_t>(),
                        static_cast<std::size_t>(totals[i].numel()), weights,
                        totals[i].mutable_data_ptr<scalar_t>());
  });
  if (dtype != own) {
    for (at::Tensor& total : totals) total = total.to(dtype);
  }
  return totals;
}

std::pair<at::Tensor, at::Tensor> layer_norm_gradients_cpu(const at::Tensor& input,
                                                           const at::Tensor& gradient, double eps) {
  TORCH_CHECK(
      input.dim() == 3 && is_on_cpu(input, input.scalar_type()) &&
          is_on_cpu(gradient, input.scalar_type()) && input.sizes() == gradient.sizes(),
      "input and gradient must be contiguous CPU tensors [samples, tokens, features] of one "
      "dtype");
  const std::int64_t samples = input.size(0);
  const std::int64_t features = input.size(2);
  at::Tensor of_weight = at::empty({samples, features}, input.options());
  at::Tensor of_bias = at::empty({samples, features}, input.options());
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "layer_norm_gradients_cpu", [&] {
    const auto rows_of = [samples](auto* all, const at::Tensor& tensor, std::int64_t n) {
      const auto size = static_cast<std::size_t>(tensor.numel() / samples);
      return std::span(all + static_cast<std::size_t>(n) * size, size);
    };
    for (std::int64_t n = 0; n < samples; ++n) {
      find_layer_norm_gradients<scalar_t>(
          rows_of(input.const_data_ptr<scalar_t>(), input, n),
          rows_of(gradient.const_data_ptr<scalar_t>(), gradient, n), eps,
          rows_of(of_weight.mutable_data_ptr<scalar_t>(), of_weight, n),
          rows_of(of_bias.mutable_data_ptr<scalar_t>(), of_bias, n));
    }
  });
  return {of_weight, of_bias};
}

std::pair<at::Tensor, std::optional<at::Tensor>> linear_gradients_cpu(
    const at::Tensor& left, const at::Tensor& right, const std::optional<at::Tensor>& gradient) {
  at::Tensor of_weight = at::bmm(left.mT(), right);
  if (!gradient) return {std::move(of_weight), std::nullopt};
  TORCH_CHECK(gradient->dim() == 3 && is_on_cpu(*gradient, gradient->scalar_type()),
              "the gradient must be a contiguous CPU tensor [samples, tokens, features]");
  at::Tensor of_bias = at::empty({gradient->size(0), gradient->size(2)}, gradient->options());
  AT_DISPATCH_FLOATING_TYPES(gradient->scalar_type(), "linear_gradients_cpu", [&] {
    const auto features = static_cast<std::size_t>(gradient->size(2));
    const std::vector<scalar_t> ones(static_cast<std::size_t>(gradient->size(1)), scalar_t{1});
    const auto* sample = gradient->const_data_ptr<scalar_t>();
    auto* total = of_bias.mutable_data_ptr<scalar_t>();
    for (std::int64_t n = 0; n < gradient->size(0); ++n) {
      find_weighted_sum<scalar_t>(sample, features, ones, total);
      sample += ones.size() * features;
      total += features;
    }
  });
  return {std::move(of_weight), std::move(of_bias)};
}

at::Tensor embedding_squared_norms_cpu(const at::Tensor& indices, const at::Tensor& gradient,
                                       const std::optional<std::int64_t>& padding) {
  TORCH_CHECK(indices.dim() == 2 && is_on_cpu(indices, at::kLong) && gradient.dim() == 3 &&
                  is_on_cpu(gradient, gradient.scalar_type()) &&
                  indices.sizes() == gradient.sizes().slice(0, 2),
              "indices and gradient must be contiguous CPU tensors [samples, tokens] and [samples, "
              "tokens, features]");
  const auto tokens = static_cast<std::size_t>(indices.size(1));
  const auto features = static_cast<std::size_t>(gradient.size(2));
  at::Tensor found = at::empty({indices.size(0)}, gradient.options());
  AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), "embedding_squared_norms_cpu", [&] {
    const std::int64_t* own = indices.const_data_ptr<std::int64_t>();
    const auto* rows = gradient.const_data_ptr<scalar_t>();
    auto* norms = found.mutable_data_ptr<scalar_t>();
    std::vector<std::size_t> order(tokens);
    std::vector<double> sum(features);  // of the gradients at equal indices
    for (std::int64_t n = 0; n < indices.size(0); ++n) {
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::ranges::sort(order, {}, [own](std::size_t token) { return own[token]; });
      double total = 0;
      for (std::size_t i = 0; i < tokens; ++i) {
        if (own[order[i]] == padding) continue;
        const scalar_t* const row = rows + order[i] * features;
        for (std::size_t j = 0; j < features; ++j) sum[j] += static_cast<double>(row[j]);
        if (i + 1 < tokens && own[order[i + 1]] == own[order[i]]) continue;
        total += sum_of<double>(sum, square);
        std::ranges::fill(sum, 0);
      }
      norms[n] = static_cast<scalar_t>(total);
      own += tokens;
      rows += tokens * features;
    }
  });
  return found;
}

}  // namespace opacus_memprof::clipping
