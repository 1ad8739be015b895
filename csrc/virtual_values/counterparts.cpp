// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/counterparts.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "virtual_values/normalization.h"
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

// A product of matrices of one type that is summed up and given in another.
template <at::Tensor (*product)(const at::Tensor&, const at::Tensor&)>
Values product_as(const Values& arguments) {
  const auto type = arguments[2].toScalarType();
  return {product(arguments[0].toTensor().to(type), arguments[1].toTensor().to(type))};
}

template <at::Tensor (*product)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Scalar&, const at::Scalar&)>
Values sum_with_product_as(const Values& arguments) {
  const auto type = arguments[3].toScalarType();
  return {product(arguments[0].toTensor().to(type), arguments[1].toTensor().to(type),
                  arguments[2].toTensor().to(type), arguments[4].toScalar(),
                  arguments[5].toScalar())};
}

// cuDNN's are bilinear, with zeros outside, and have the corners' centers at -1 and 1.
Values grid_sampler(const Values& arguments) {
  return {at::grid_sampler_2d(arguments[0].toTensor(), arguments[1].toTensor(), 0, 0, true)};
}

Values grid_sampler_backward(const Values& arguments) {
  const auto [input, grid] =
      at::grid_sampler_2d_backward(arguments[2].toTensor(), arguments[0].toTensor(),
                                   arguments[1].toTensor(), 0, 0, true, {true, true});
  return {input, grid};
}

// cuDNN's gives the gradient with the loss.
template <typename Lengths>
Values ctc_loss(const at::Tensor& scores, const at::Tensor& targets, const Lengths& input_lengths,
                const Lengths& target_lengths, std::int64_t blank, bool zero_infinity) {
  const auto [loss, alpha] =
      at::_ctc_loss(scores, targets, input_lengths, target_lengths, blank, zero_infinity);
  return {loss, at::_ctc_loss_backward(at::ones_like(loss), scores, targets, input_lengths,
                                       target_lengths, loss, alpha, blank, zero_infinity)};
}

Values ctc_loss_of_lists(const Values& arguments) {
  const auto input_lengths = arguments[2].toIntVector();
  const auto target_lengths = arguments[3].toIntVector();
  return ctc_loss<at::IntArrayRef>(arguments[0].toTensor(), arguments[1].toTensor(), input_lengths,
                                   target_lengths, arguments[4].toInt(), arguments[6].toBool());
}

Values ctc_loss_of_tensors(const Values& arguments) {
  return ctc_loss<at::Tensor>(arguments[0].toTensor(), arguments[1].toTensor(),
                              arguments[2].toTensor(), arguments[3].toTensor(),
                              arguments[4].toInt(), arguments[6].toBool());
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
      {"aten::histc", &histogram},
      {"aten::log_sigmoid_backward", &log_sigmoid_backward},
      {"aten::mm.dtype", &product_as<at::mm>},
      {"aten::bmm.dtype", &product_as<at::bmm>},
      {"aten::addmm.dtype", &sum_with_product_as<at::addmm>},
      {"aten::baddbmm.dtype", &sum_with_product_as<at::baddbmm>},
      {"aten::cudnn_grid_sampler", &grid_sampler},
      {"aten::cudnn_grid_sampler_backward", &grid_sampler_backward},
      {"aten::_cudnn_ctc_loss", &ctc_loss_of_lists},
      {"aten::_cudnn_ctc_loss.Tensor", &ctc_loss_of_tensors},
      {"aten::_embedding_bag", &embedding_bag},
      {"aten::_embedding_bag_forward_only", &embedding_bag},
  };
  const auto found = all.find(operation);
  if (found != all.end()) return found->second;
  const Counterpart normalization = normalization_counterpart_of(operation);
  return normalization != nullptr ? normalization : recurrent_counterpart_of(operation);
}

}  // namespace opacus_memprof::virtual_values
