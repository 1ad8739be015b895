// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/recurrent.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace opacus_memprof::virtual_values {
namespace {

using Values = std::vector<c10::IValue>;

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

constexpr std::int64_t kLstm = 2;
constexpr std::int64_t kGru = 3;

// A call of cuDNN's, by the CPU's own layers.
struct Recurrent {
  at::Tensor input;
  std::vector<at::Tensor> weights;
  std::size_t stride = 0;   // weights of a layer in one direction: with biases at least 4
  at::Tensor hidden, cell;  // without a cell of GRU and RNN
  std::int64_t mode = 0;    // as cuDNN numbers them
  std::int64_t size = 0;    // of the hidden state
  std::int64_t layers = 1;
  bool batch_first = false;
  double dropout = 0;
  bool train = false;
  bool bidirectional = false;
  std::vector<std::int64_t> batch_sizes;  // of packed sequences

  // `mode_at` is where the arguments of forward and backward go on alike.
  Recurrent(const Values& arguments, std::size_t mode_at)
      : input(arguments[0].toTensor()),
        weights(arguments[1].toTensorVector()),
        stride(static_cast<std::size_t>(arguments[2].toInt())),
        hidden(arguments[4].toTensor()),
        cell(tensor_or_none(arguments[5])),
        mode(arguments[mode_at].toInt()),
        size(arguments[mode_at + 1].toInt()),
        layers(arguments[mode_at + 3].toInt()),
        batch_first(arguments[mode_at + 4].toBool()),
        dropout(arguments[mode_at + 5].toDouble()),
        train(arguments[mode_at + 6].toBool()),
        bidirectional(arguments[mode_at + 7].toBool()),
        batch_sizes(arguments[mode_at + 8].toIntVector()) {}

  [[nodiscard]] bool biased() const { return stride >= 4; }

  // Autocast gives them without their shapes.
  [[nodiscard]] std::vector<at::Tensor> matrices() const {
    std::vector<at::Tensor> shaped = weights;
    for (std::size_t index = 0; index < shaped.size(); ++index) {
      const std::size_t place = index % stride;
      const bool projection = stride % 2 == 1 && place == stride - 1;
      if (projection)
        shaped[index] = shaped[index].view({-1, size});
      else if (place < 2)
        shaped[index] = shaped[index].view({(mode == kLstm ? 4 : mode == kGru ? 3 : 1) * size, -1});
      else
        shaped[index] = shaped[index].view({-1});
    }
    return shaped;
  }

  [[nodiscard]] bool draws() const { return train && dropout > 0 && layers > 1; }

  // The output and the last states. Draws from the default generator, which the caller has put
  // back where it was afterwards.
  [[nodiscard]] std::vector<at::Tensor> outputs(std::uint64_t seed) const {
    if (at::Generator generator = at::detail::getDefaultCPUGenerator(); draws())
      generator.set_current_seed(seed);
    const at::Tensor sizes =
        batch_sizes.empty() ? at::Tensor() : at::tensor(batch_sizes, at::TensorOptions(at::kLong));
    const auto run = [&](const auto& layer, const auto& states) {
      return sizes.defined() ? layer(input, sizes, states, matrices(), biased(), layers, dropout,
                                     train, bidirectional)
                             : layer(input, states, matrices(), biased(), layers, dropout, train,
                                     bidirectional, batch_first);
    };
    if (mode == kLstm) {
      auto [output, last_hidden, last_cell] =
          run([](const auto&... given) { return at::lstm(given...); }, std::vector{hidden, cell});
      return {output, last_hidden, last_cell};
    }
    auto [output, last] = run(
        [this](const auto&... given) {
          return mode == 0   ? at::rnn_relu(given...)
                 : mode == 1 ? at::rnn_tanh(given...)
                             : at::gru(given...);
        },
        hidden);
    return {output, last, at::Tensor()};
  }
};

Values recurrent(const Values& arguments) {
  const Recurrent layer(arguments, 6);
  const auto seed =
      layer.draws() ? at::randint(1L << 62, {1}, at::TensorOptions(at::kLong)) : at::Tensor();
  const auto outputs =
      layer.outputs(seed.defined() ? static_cast<std::uint64_t>(seed.item<std::int64_t>()) : 0);
  Values values(outputs.begin(), outputs.end());
  values.emplace_back(seed);  // in what is kept for backward
  return values;
}

// By the CPU's autograd over a second forward pass.
Values recurrent_backward(const Values& arguments) {
  Recurrent layer(arguments, 10);
  const auto keys =
      c10::impl::ForceDispatchKeyGuard(c10::default_included_set, c10::default_excluded_set);
  const at::AutoGradMode enabled(true);
  std::vector<at::Tensor> inputs;
  const auto watch = [&](at::Tensor& tensor) {
    tensor = tensor.detach().requires_grad_();
    inputs.push_back(tensor);
  };
  watch(layer.input);
  watch(layer.hidden);
  if (layer.cell.defined()) watch(layer.cell);
  for (at::Tensor& weight : layer.weights) watch(weight);
  const at::Tensor kept = arguments[20].toTensor().flatten();
  const auto outputs = layer.outputs(
      layer.draws()
          ? static_cast<std::uint64_t>(kept.narrow(0, 0, 8).view(at::kLong).item<std::int64_t>())
          : 0);
  std::vector<at::Tensor> reached, gradients;
  for (std::size_t index = 0; index < outputs.size(); ++index) {
    const at::Tensor gradient = tensor_or_none(arguments[7 + index]);
    if (!gradient.defined()) continue;
    reached.push_back(outputs[index]);
    gradients.push_back(gradient);
  }
  auto found = torch::autograd::grad(reached, inputs, gradients, std::nullopt, false, true);
  for (std::size_t index = 0; index < found.size(); ++index) {
    if (!found[index].defined()) found[index] = at::zeros_like(inputs[index].detach());
  }
  const std::size_t states = layer.cell.defined() ? 2 : 1;
  return {found[0], found[1], states == 2 ? found[2] : at::Tensor(),
          std::vector<at::Tensor>(found.begin() + 1 + static_cast<std::ptrdiff_t>(states),
                                  found.end())};
}

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

// Of a sum of gates with their bias, which may be undefined.
std::vector<at::Tensor> gates_of(const at::Tensor& gates, const at::Tensor& bias,
                                 std::int64_t count) {
  return (bias.defined() ? wide(gates) + wide(bias) : wide(gates)).chunk(count, 1);
}

at::Tensor of_sigmoid(const at::Tensor& value) { return value * (1 - value); }
at::Tensor of_tanh(const at::Tensor& value) { return 1 - value * value; }

// What the backward reads of the forward is in the last result, as these two arrange it.
Values lstm_cell(const Values& arguments) {
  const at::Tensor before = arguments[2].toTensor();
  const auto type = before.scalar_type();
  const auto input = gates_of(arguments[0].toTensor(), tensor_or_none(arguments[3]), 4);
  const auto state = gates_of(arguments[1].toTensor(), tensor_or_none(arguments[4]), 4);
  const at::Tensor in = (input[0] + state[0]).sigmoid();
  const at::Tensor forget = (input[1] + state[1]).sigmoid();
  const at::Tensor change = (input[2] + state[2]).tanh();
  const at::Tensor out = (input[3] + state[3]).sigmoid();
  const at::Tensor cell = forget * wide(before) + in * change;
  return {(out * cell.tanh()).to(type), cell.to(type),
          at::cat({in, forget, change, out}, 1).to(type)};
}

Values lstm_cell_backward(const Values& arguments) {
  const at::Tensor before = wide(arguments[2].toTensor());
  const at::Tensor kept = arguments[4].toTensor();
  const auto type = kept.scalar_type();
  const auto gates = wide(kept).chunk(4, 1);
  const at::Tensor after = wide(arguments[3].toTensor()).tanh();
  const auto given = [&](const c10::IValue& value) {
    const at::Tensor gradient = tensor_or_none(value);
    return gradient.defined() ? wide(gradient) : at::zeros_like(before);
  };
  const at::Tensor of_hidden = given(arguments[0]);
  const at::Tensor of_cell = given(arguments[1]) + of_hidden * gates[3] * of_tanh(after);
  const at::Tensor of_gates =
      at::cat({of_cell * gates[2] * of_sigmoid(gates[0]), of_cell * before * of_sigmoid(gates[1]),
               of_cell * gates[0] * of_tanh(gates[2]), of_hidden * after * of_sigmoid(gates[3])},
              1);
  return {of_gates.to(type), (of_cell * gates[1]).to(type),
          arguments[5].toBool() ? of_gates.sum(0).to(type) : at::Tensor()};
}

Values gru_cell(const Values& arguments) {
  const at::Tensor before = arguments[2].toTensor();
  const auto type = before.scalar_type();
  const auto input = gates_of(arguments[0].toTensor(), tensor_or_none(arguments[3]), 3);
  const auto state = gates_of(arguments[1].toTensor(), tensor_or_none(arguments[4]), 3);
  const at::Tensor reset = (input[0] + state[0]).sigmoid();
  const at::Tensor update = (input[1] + state[1]).sigmoid();
  const at::Tensor change = (input[2] + reset * state[2]).tanh();
  return {(change + update * (wide(before) - change)).to(type),
          at::cat({reset, update, change, wide(before), state[2]}, 1).to(type)};
}

Values gru_cell_backward(const Values& arguments) {
  const at::Tensor gradient = wide(arguments[0].toTensor());
  const auto type = arguments[0].toTensor().scalar_type();
  const auto kept = wide(arguments[1].toTensor()).chunk(5, 1);
  const at::Tensor &reset = kept[0], &update = kept[1], &change = kept[2];
  const at::Tensor of_update = gradient * (kept[3] - change) * of_sigmoid(update);
  const at::Tensor of_change = gradient * (1 - update) * of_tanh(change);
  const at::Tensor of_reset = of_change * kept[4] * of_sigmoid(reset);
  const at::Tensor of_input = at::cat({of_reset, of_update, of_change}, 1);
  const at::Tensor of_state = at::cat({of_reset, of_update, of_change * reset}, 1);
  const auto of_bias = [&](const at::Tensor& gates) {
    return arguments[2].toBool() ? gates.sum(0).to(type) : at::Tensor();
  };
  return {of_input.to(type), of_state.to(type), (gradient * update).to(type), of_bias(of_input),
          of_bias(of_state)};
}

}  // namespace

Counterpart recurrent_counterpart_of(std::string_view operation) {
  static const std::unordered_map<std::string_view, Counterpart> all{
      {"aten::_cudnn_rnn", &recurrent},
      {"aten::_cudnn_rnn_backward", &recurrent_backward},
      {"aten::_thnn_fused_lstm_cell", &lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", &gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward},
  };
  const auto found = all.find(operation);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace opacus_memprof::virtual_values
