// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/normalization.h"

#include <ATen/ATen.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

using Values = std::vector<c10::IValue>;

std::optional<at::Tensor> given(const c10::IValue& value) { return value.toOptional<at::Tensor>(); }

// In float where it is in half, as the kernels of a GPU compute it.
at::Tensor as_computed(const at::Tensor& tensor) {
  return tensor.defined() && is_half(tensor) ? tensor.to(at::kFloat) : tensor;
}

at::Tensor as_computed(const c10::IValue& value) {
  return as_computed(given(value).value_or(at::Tensor()));
}

// The output, and what a GPU's kernel saves of it, in float: the mean and the reciprocal deviation
// by which it normalized. The CPU saves neither without training, and both in half where the input
// is.
Values normalized_by_batch(const at::Tensor& input, const c10::IValue& weight,
                           const c10::IValue& bias, const c10::IValue& running_mean,
                           const c10::IValue& running_variance, bool training, double momentum,
                           double epsilon) {
  const at::Tensor averages = as_computed(running_mean);
  const at::Tensor variances = as_computed(running_variance);
  auto [output, mean, deviation] =
      at::native_batch_norm(as_computed(input), as_computed(weight), as_computed(bias), averages,
                            variances, training, momentum, epsilon);
  if (!training) {
    mean = averages;
    deviation = (variances + epsilon).rsqrt();
  } else if (averages.defined()) {
    running_mean.toTensor().copy_(averages);
    running_variance.toTensor().copy_(variances);
  }
  return {output.to(input.scalar_type()), mean, deviation};
}

Values native_batch_norm(const Values& arguments) {
  return normalized_by_batch(arguments[0].toTensor(), arguments[1], arguments[2], arguments[3],
                             arguments[4], arguments[5].toBool(), arguments[6].toDouble(),
                             arguments[7].toDouble());
}

Values batch_norm_without_averages(const Values& arguments) {
  return normalized_by_batch(arguments[0].toTensor(), arguments[1], arguments[2], {}, {},
                             arguments[3].toBool(), arguments[4].toDouble(),
                             arguments[5].toDouble());
}

Values batch_norm_with_update(const Values& arguments) {
  Values values =
      normalized_by_batch(arguments[0].toTensor(), arguments[1], arguments[2], arguments[3],
                          arguments[4], true, arguments[5].toDouble(), arguments[6].toDouble());
  values.emplace_back();  // cuDNN's own
  return values;
}

Values layer_norm(const Values& arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const auto [output, mean, deviation] = at::native_layer_norm(
      as_computed(input), arguments[1].toIntVector(), as_computed(arguments[2]),
      as_computed(arguments[3]), arguments[4].toDouble());
  return {output.to(input.scalar_type()), mean, deviation};
}

Values batch_norm(const Values& arguments) {
  const auto [output, mean, deviation] = at::native_batch_norm(
      arguments[0].toTensor(), given(arguments[1]), given(arguments[2]), given(arguments[3]),
      given(arguments[4]), arguments[5].toBool(), arguments[6].toDouble(), arguments[7].toDouble());
  return {output, mean, deviation, {}};
}

Values batch_norm_backward(const Values& arguments) {
  const auto [input, weight, bias] = at::native_batch_norm_backward(
      arguments[1].toTensor(), arguments[0].toTensor(), given(arguments[2]), given(arguments[3]),
      given(arguments[4]), given(arguments[5]), given(arguments[6]), true, arguments[7].toDouble(),
      {true, true, true});
  return {input, weight, bias};
}

Values rms_norm_backward(const Values& arguments) {
  const at::Tensor gradient = arguments[0].toTensor().to(at::kFloat);
  const at::Tensor& input = arguments[1].toTensor();
  const auto axes = static_cast<std::int64_t>(arguments[2].toIntVector().size());
  const auto weight = given(arguments[4]);
  const at::Tensor deviation = arguments[3].toTensor().to(at::kFloat);
  const at::Tensor normalized = input.to(at::kFloat) * deviation;
  const at::Tensor weighted = weight ? gradient * *weight : gradient;
  std::vector<std::int64_t> inner, outer;
  for (std::int64_t axis = 0; axis < input.dim(); ++axis) {
    (axis < input.dim() - axes ? outer : inner).push_back(axis);
  }
  const at::Tensor of_input =
      deviation * (weighted - normalized * (weighted * normalized).mean(inner, true));
  Values values{of_input.to(input.scalar_type()), {}};
  if (weight) {
    const at::Tensor products = gradient * normalized;
    values[1] = (outer.empty() ? products : products.sum(outer)).to(weight->scalar_type());
  }
  return values;
}

// The parts of which nn.SyncBatchNorm is made, for inputs with any number of dimensions after that
// of the channels.
struct Channels {
  at::Tensor input;  // in the type in which it is computed

  explicit Channels(const c10::IValue& value) : input(as_computed(value)) {}

  [[nodiscard]] std::vector<std::int64_t> others() const {
    std::vector<std::int64_t> dimensions;
    for (std::int64_t each = 0; each < input.dim(); ++each)
      if (each != 1) dimensions.push_back(each);
    return dimensions;
  }
  // A number for each channel, as it meets the input.
  [[nodiscard]] at::Tensor wide(const at::Tensor& numbers) const {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
    sizes[1] = -1;
    return numbers.to(input.scalar_type()).view(sizes);
  }
  [[nodiscard]] at::Tensor sum(const at::Tensor& tensor) const { return tensor.sum(others()); }
};

Values channel_statistics(const Values& arguments) {
  const Channels channels(arguments[0]);
  const at::Tensor mean = channels.input.mean(channels.others());
  const at::Tensor variance = channels.input.var(channels.others(), false);
  return {mean, (variance + arguments[1].toDouble()).rsqrt()};
}

Values normalize_channels(const Values& arguments) {
  const Channels channels(arguments[0]);
  at::Tensor output = (channels.input - channels.wide(arguments[3].toTensor())) *
                      channels.wide(arguments[4].toTensor());
  if (const auto weight = given(arguments[1])) output = output * channels.wide(*weight);
  if (const auto bias = given(arguments[2])) output = output + channels.wide(*bias);
  return {output.to(arguments[0].toTensor().scalar_type())};
}

// `counts`: of the elements that each rank has for a channel.
Values gather_statistics(const Values& arguments, const at::Tensor& counts) {
  const double momentum = arguments[5].toDouble(), epsilon = arguments[6].toDouble();
  const at::Tensor means = arguments[1].toTensor().to(at::kDouble);
  const at::Tensor share = counts.to(at::kDouble).view({-1, 1});
  const at::Tensor all = share.sum();
  const at::Tensor squares =
      arguments[2].toTensor().to(at::kDouble).pow(-2) - epsilon + means * means;
  const at::Tensor mean = (means * share).sum(0) / all;
  const at::Tensor variance = (squares * share).sum(0) / all - mean * mean;
  const auto update = [&](const c10::IValue& average, const at::Tensor& found) {
    if (const auto tensor = given(average))
      tensor->copy_(tensor->to(at::kDouble) * (1 - momentum) + found * momentum);
  };
  update(arguments[3], mean);
  update(arguments[4], variance * all / (all - 1));
  const auto type = arguments[1].toTensor().scalar_type();
  return {mean.to(type), (variance + epsilon).rsqrt().to(type)};
}

Values gather_statistics_of_counts(const Values& arguments) {
  return gather_statistics(arguments, arguments[7].toTensor());
}

Values gather_statistics_of_equals(const Values& arguments) {
  return gather_statistics(
      arguments, at::full({arguments[1].toTensor().size(0)}, arguments[7].toInt(), at::kDouble));
}

Values channel_gradients(const Values& arguments) {
  const Channels gradient(arguments[0]), channels(arguments[1]);
  const at::Tensor of_output = gradient.sum(gradient.input);
  const at::Tensor of_centered =
      channels.sum(gradient.input * (channels.input - channels.wide(arguments[2].toTensor())));
  const at::Tensor of_weight = of_centered * arguments[3].toTensor();
  const auto weight = given(arguments[4]);
  const auto as_weight = [&](const at::Tensor& tensor) {
    return weight ? tensor.to(weight->scalar_type()) : tensor;
  };
  const auto asked = [&](std::size_t index, const at::Tensor& tensor) {
    return arguments[index].toBool() ? c10::IValue(tensor) : c10::IValue();
  };
  return {asked(5, of_output), asked(5, of_centered), asked(6, as_weight(of_weight)),
          asked(7, as_weight(of_output))};
}

Values gradient_through_channels(const Values& arguments) {
  const Channels gradient(arguments[0]), channels(arguments[1]);
  const at::Tensor count = arguments[7].toTensor().sum();
  const at::Tensor deviation = arguments[3].toTensor();
  const at::Tensor slope = arguments[6].toTensor() / count * deviation * deviation;
  at::Tensor factor = deviation;
  if (const auto weight = given(arguments[4])) factor = factor * *weight;
  const at::Tensor centered = channels.input - channels.wide(arguments[2].toTensor());
  const at::Tensor of_input = (gradient.input - channels.wide(arguments[5].toTensor() / count) -
                               centered * channels.wide(slope)) *
                              channels.wide(factor);
  return {of_input.to(arguments[1].toTensor().scalar_type())};
}

}  // namespace

Counterpart normalization_counterpart_of(std::string_view operation) {
  static const std::unordered_map<std::string_view, Counterpart> all{
      {"aten::native_batch_norm", &native_batch_norm},
      {"aten::_native_batch_norm_legit", &native_batch_norm},
      {"aten::_native_batch_norm_legit.no_stats", &batch_norm_without_averages},
      {"aten::_batch_norm_with_update", &batch_norm_with_update},
      {"aten::native_layer_norm", &layer_norm},
      {"aten::cudnn_batch_norm", &batch_norm},
      {"aten::cudnn_batch_norm_backward", &batch_norm_backward},
      {"aten::_fused_rms_norm_backward", &rms_norm_backward},
      {"aten::batch_norm_stats", &channel_statistics},
      {"aten::batch_norm_elemt", &normalize_channels},
      {"aten::batch_norm_gather_stats", &gather_statistics_of_equals},
      {"aten::batch_norm_gather_stats_with_counts", &gather_statistics_of_counts},
      {"aten::batch_norm_backward_reduce", &channel_gradients},
      {"aten::batch_norm_backward_elemt", &gradient_through_channels},
  };
  const auto found = all.find(operation);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace opacus_memprof::virtual_values
