// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/counterparts.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "virtual_values/recurrent.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

using Values = std::vector<c10::IValue>;

std::optional<at::Tensor> optional(const c10::IValue& value) {
  return value.toOptional<at::Tensor>();
}

at::Tensor defined_or(const std::optional<at::Tensor>& tensor) {
  return tensor ? *tensor : at::Tensor();
}

struct Attention {
  at::Tensor query, key, value;
  at::Tensor bias;  // or undefined
  bool causal = false;
  std::optional<double> scale;
  double dropout = 0;
  std::int64_t seed =
      0;  // of the dropout mask; the forward hands it to the backward as the state of the generator

  [[nodiscard]] double factor() const {
    return scale ? *scale : 1 / std::sqrt(static_cast<double>(query.size(-1)));
  }

  // Of queries to each head of keys, where several heads share one.
  [[nodiscard]] at::Tensor for_each_head(const at::Tensor& shared) const {
    const auto wide = shared.to(at::kFloat);
    return shared.size(-3) == query.size(-3)
               ? wide
               : wide.repeat_interleave(query.size(-3) / shared.size(-3), -3);
  }

  [[nodiscard]] at::Tensor probabilities() const {
    at::Tensor scores =
        at::matmul(query.to(at::kFloat), for_each_head(key).transpose(-2, -1)) * factor();
    if (causal) {
      const auto future = at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1);
      scores = scores.masked_fill(future, -INFINITY);
    }
    if (bias.defined()) scores = scores + bias;
    // A row that sees nothing gives zeros, as the fused kernels do.
    return at::softmax(scores, -1).nan_to_num(0.0);
  }

  // What dropout multiplies the probabilities by.
  [[nodiscard]] at::Tensor mask() const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
    const auto heads = query.sizes().slice(0, static_cast<std::size_t>(query.dim()) - 1);
    auto sizes = heads.vec();
    sizes.push_back(key.size(-2));
    return at::empty(sizes, at::kFloat).bernoulli_(1 - dropout, generator).div_(1 - dropout);
  }

  [[nodiscard]] at::Tensor output() const {
    at::Tensor chosen = probabilities();
    if (dropout > 0) chosen = chosen * mask();
    return at::matmul(chosen, for_each_head(value)).to(query.scalar_type());
  }

  // Of query, key, value and bias.
  [[nodiscard]] std::vector<at::Tensor> gradients(const at::Tensor& of_output) const {
    const auto to_each_key = [&](const at::Tensor& gradient, const at::Tensor& shared) {
      if (gradient.sizes() == shared.sizes()) return gradient.to(shared.scalar_type());
      auto sizes = shared.sizes().vec();
      sizes.insert(sizes.end() - 2, gradient.size(-3) / shared.size(-3));
      return gradient.reshape(sizes).sum(-3).to(shared.scalar_type());
    };
    const at::Tensor chosen = probabilities();
    const at::Tensor wide = of_output.to(at::kFloat);
    at::Tensor of_chosen = at::matmul(wide, for_each_head(value).transpose(-2, -1));
    at::Tensor kept = chosen;
    if (dropout > 0) {
      const at::Tensor factors = mask();
      of_chosen = of_chosen * factors;
      kept = chosen * factors;
    }
    const at::Tensor of_scores = chosen * (of_chosen - (of_chosen * chosen).sum(-1, true));
    return {
        (at::matmul(of_scores, for_each_head(key)) * factor()).to(query.scalar_type()),
        to_each_key(at::matmul(of_scores.transpose(-2, -1), query.to(at::kFloat)) * factor(), key),
        to_each_key(at::matmul(kept.transpose(-2, -1), wide), value),
        bias.defined() ? at::sum_to(of_scores, bias.sizes()).to(bias.scalar_type()) : at::Tensor()};
  }
};

// From the default generator, which is seeded for this call.
std::int64_t draw_seed(double dropout) {
  return dropout > 0 ? at::randint(std::numeric_limits<std::int64_t>::max(), {}, at::kLong)
                           .item<std::int64_t>()
                     : 0;
}

Values flash(const Values& arguments) {
  const double dropout = arguments[3].toDouble();
  const Attention attention{.query = arguments[0].toTensor(),
                            .key = arguments[1].toTensor(),
                            .value = arguments[2].toTensor(),
                            .bias = {},
                            .causal = arguments[4].toBool(),
                            .scale = arguments[6].toOptional<double>(),
                            .dropout = dropout,
                            .seed = draw_seed(dropout)};
  Values values(9);
  values[0] = attention.output();
  values[6] = at::full({2}, attention.seed, at::kLong).view(at::kUInt64);
  return values;
}

// The two others take a bias, and return the generator's state at another place.
Values biased_attention(const Values& arguments, std::size_t scale, std::size_t seed,
                        std::size_t returns) {
  const double dropout = arguments[5].toDouble();
  const Attention attention{.query = arguments[0].toTensor(),
                            .key = arguments[1].toTensor(),
                            .value = arguments[2].toTensor(),
                            .bias = defined_or(optional(arguments[3])),
                            .causal = arguments[6].toBool(),
                            .scale = arguments[scale].toOptional<double>(),
                            .dropout = dropout,
                            .seed = draw_seed(dropout)};
  Values values(returns);
  values[0] = attention.output();
  values[seed] = at::full({}, attention.seed, at::kLong);
  return values;
}

Values efficient(const Values& arguments) { return biased_attention(arguments, 7, 2, 4); }

Values cudnn(const Values& arguments) { return biased_attention(arguments, 8, 6, 9); }

std::int64_t seed_in(const c10::IValue& state) {
  const at::Tensor& tensor = state.toTensor();
  return tensor.numel() > 0 ? tensor.view(at::kLong).flatten()[0].item<std::int64_t>() : 0;
}

Values gradients_of(const Attention& attention, const at::Tensor& of_output, std::size_t count) {
  const auto gradients = attention.gradients(of_output);
  Values values;
  for (std::size_t index = 0; index < count; ++index) {
    values.push_back(gradients[index].defined() ? c10::IValue(gradients[index]) : c10::IValue());
  }
  return values;
}

Values flash_backward(const Values& arguments) {
  const Attention attention{.query = arguments[1].toTensor(),
                            .key = arguments[2].toTensor(),
                            .value = arguments[3].toTensor(),
                            .bias = {},
                            .causal = arguments[11].toBool(),
                            .scale = arguments[14].toOptional<double>(),
                            .dropout = arguments[10].toDouble(),
                            .seed = seed_in(arguments[12])};
  return gradients_of(attention, arguments[0].toTensor(), 3);
}

Values efficient_backward(const Values& arguments) {
  const Attention attention{.query = arguments[1].toTensor(),
                            .key = arguments[2].toTensor(),
                            .value = arguments[3].toTensor(),
                            .bias = defined_or(optional(arguments[4])),
                            .causal = arguments[11].toBool(),
                            .scale = arguments[12].toOptional<double>(),
                            .dropout = arguments[9].toDouble(),
                            .seed = seed_in(arguments[7])};
  return gradients_of(attention, arguments[0].toTensor(), 4);
}

Values cudnn_backward(const Values& arguments) {
  const Attention attention{.query = arguments[1].toTensor(),
                            .key = arguments[2].toTensor(),
                            .value = arguments[3].toTensor(),
                            .bias = defined_or(optional(arguments[8])),
                            .causal = arguments[14].toBool(),
                            .scale = arguments[15].toOptional<double>(),
                            .dropout = arguments[13].toDouble(),
                            .seed = seed_in(arguments[6])};
  return gradients_of(attention, arguments[0].toTensor(), 3);
}

// In float where it is in half, as the kernels of a GPU compute it.
at::Tensor as_computed(const at::Tensor& tensor) {
  return tensor.defined() && is_half(tensor) ? tensor.to(at::kFloat) : tensor;
}

at::Tensor as_computed(const c10::IValue& value) {
  return as_computed(defined_or(optional(value)));
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
  const auto [output, mean, deviation] =
      at::native_batch_norm(arguments[0].toTensor(), optional(arguments[1]), optional(arguments[2]),
                            optional(arguments[3]), optional(arguments[4]), arguments[5].toBool(),
                            arguments[6].toDouble(), arguments[7].toDouble());
  return {output, mean, deviation, {}};
}

Values batch_norm_backward(const Values& arguments) {
  const auto [input, weight, bias] = at::native_batch_norm_backward(
      arguments[1].toTensor(), arguments[0].toTensor(), optional(arguments[2]),
      optional(arguments[3]), optional(arguments[4]), optional(arguments[5]),
      optional(arguments[6]), true, arguments[7].toDouble(), {true, true, true});
  return {input, weight, bias};
}

Values rms_norm_backward(const Values& arguments) {
  const at::Tensor gradient = arguments[0].toTensor().to(at::kFloat);
  const at::Tensor& input = arguments[1].toTensor();
  const auto axes = static_cast<std::int64_t>(arguments[2].toIntVector().size());
  const auto weight = optional(arguments[4]);
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

Values histogram(const Values& arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::Tensor counted =
      at::histc(at::isFloatingType(input.scalar_type()) ? input : input.to(at::kDouble),
                arguments[1].toInt(), arguments[2].toScalar(), arguments[3].toScalar());
  return {counted.to(input.scalar_type())};
}

// Which bag each index is in, and how many are in each: the CPU leaves out what it does not need,
// and counts bags otherwise.
Values embedding_bag(const Values& arguments) {
  const at::Tensor& indices = arguments[1].toTensor();
  const at::Tensor& offsets = arguments[2].toTensor();
  const std::int64_t mode = arguments[4].toInt();
  auto [output, bags, sizes, largest] = at::_embedding_bag(
      arguments[0].toTensor(), indices, offsets, arguments[3].toBool(), mode, arguments[5].toBool(),
      optional(arguments[6]), arguments[7].toBool(), arguments[8].toInt());
  if (bags.numel() != indices.numel())
    bags =
        at::searchsorted(offsets, at::arange(indices.numel(), offsets.options()), false, true) - 1;
  if (sizes.numel() < offsets.numel()) sizes = at::constant_pad_nd(sizes, {0, 1});
  constexpr std::int64_t kMax = 2;
  return {output, bags.to(indices.scalar_type()), sizes,
          mode == kMax ? largest : at::empty({0}, indices.options())};
}

// The CPU's kernel reads what its own forward has left in a buffer.
Values log_sigmoid_backward(const Values& arguments) {
  return {arguments[0].toTensor() * at::sigmoid(-arguments[1].toTensor())};
}

}  // namespace

Counterpart counterpart_of(const std::string& operation) {
  static const std::unordered_map<std::string_view, Counterpart> all{
      {"aten::_scaled_dot_product_flash_attention", &flash},
      {"aten::_scaled_dot_product_flash_attention_backward", &flash_backward},
      {"aten::_scaled_dot_product_efficient_attention", &efficient},
      {"aten::_scaled_dot_product_efficient_attention_backward", &efficient_backward},
      {"aten::_scaled_dot_product_cudnn_attention", &cudnn},
      {"aten::_scaled_dot_product_cudnn_attention_backward", &cudnn_backward},
      {"aten::native_batch_norm", &native_batch_norm},
      {"aten::_native_batch_norm_legit", &native_batch_norm},
      {"aten::_native_batch_norm_legit.no_stats", &batch_norm_without_averages},
      {"aten::_batch_norm_with_update", &batch_norm_with_update},
      {"aten::native_layer_norm", &layer_norm},
      {"aten::cudnn_batch_norm", &batch_norm},
      {"aten::cudnn_batch_norm_backward", &batch_norm_backward},
      {"aten::_fused_rms_norm_backward", &rms_norm_backward},
      {"aten::histc", &histogram},
      {"aten::log_sigmoid_backward", &log_sigmoid_backward},
      {"aten::_embedding_bag", &embedding_bag},
      {"aten::_embedding_bag_forward_only", &embedding_bag},
  };
  const auto found = all.find(operation);
  return found == all.end() ? recurrent_counterpart_of(operation) : found->second;
}

}  // namespace opacus_memprof::virtual_values
