// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/call.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "virtual_values/counts.h"
#include "virtual_values/execute.h"
#include "virtual_values/indices.h"
#include "virtual_values/lists.h"
#include "virtual_values/parts.h"
#include "virtual_values/tensors.h"
#include "virtual_values/uniform.h"

namespace opacus_memprof::virtual_values {
namespace {

// More than this takes longer than a run may wait for values that rarely decide anything.
constexpr double kExpense = 3e8;

constexpr std::string_view kUnscale = "aten::_amp_foreach_non_finite_check_and_unscale_";

constexpr std::array<std::string_view, 4> kAsserted{
    "out of bounds", "out of range", "probability tensor contains", "should be between 0 and 1"};

// They end with what their solver reports to the host, on both devices.
constexpr std::array<std::string_view, 2> kIterative{"aten::_linalg_svd", "aten::_linalg_eigh"};

bool is_inexact(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

std::string reason_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const c10::Error*>(&error);
  return own != nullptr ? own->what_without_backtrace() : error.what();
}

// The CPU refuses values that a GPU's kernel asserts not to meet.
bool is_asserted(const Operation& operation, const std::exception& error) {
  const std::string reason = reason_of(error);
  return operation.name == "aten::_assert_async" ||
         dynamic_cast<const c10::IndexError*>(&error) != nullptr ||
         std::any_of(kAsserted.begin(), kAsserted.end(),
                     [&](std::string_view each) { return reason.find(each) != std::string::npos; });
}

// What a real GPU ends a call with that the CPU has refused; nullptr if the reason may be the CPU's
// own. Called while the error is handled.
std::exception_ptr error_of_gpu(const Operation& operation, const std::exception& error) {
  constexpr std::int32_t kAssert = 710;  // cudaErrorAssert
  if (is_asserted(operation, error)) {
    return std::make_exception_ptr(
        c10::AcceleratorError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, kAssert,
                              "CUDA error: device-side assert triggered (" + operation.name + ": " +
                                  reason_of(error) + ")"));
  }
  const bool diverged =
      dynamic_cast<const c10::LinAlgError*>(&error) != nullptr &&
      std::find(kIterative.begin(), kIterative.end(), operation.name) != kIterative.end();
  return diverged ? std::current_exception() : nullptr;
}

bool scales_first_by_zero(const Operation& operation, const std::vector<c10::IValue>& arguments) {
  if (operation.beta < 0) return false;
  const c10::IValue& beta = arguments[static_cast<std::size_t>(operation.beta)];
  return beta.isScalar() && beta.toScalar().equal(0);
}

}  // namespace

Call::Call(const c10::OperatorHandle& handle, const Operation& operation,
           const torch::jit::Stack& stack)
    : handle_(handle), operation_(operation) {
  const std::size_t count = operation.parameters.size();
  arguments_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const bool scaled_by_zero = scales_first_by_zero(operation, arguments_);
  for (std::size_t index = 0; index < count; ++index) {
    Parameter parameter = operation.parameters[index];
    if (index == 0 && scaled_by_zero) parameter.read = false;
    if (static_cast<int>(index) == operation.momenta && operation.first_step >= 0 &&
        arguments_[static_cast<std::size_t>(operation.first_step)].toBool())
      parameter.read = false;
    if (parameter.average && operation.training >= 0 &&
        !arguments_[static_cast<std::size_t>(operation.training)].toBool())
      parameter.written = false;
    if (arguments_[index].isDevice()) cuda_ = cuda_ || arguments_[index].toDevice().is_cuda();
    const bool list = arguments_[index].isList();
    std::size_t position = 0;
    for_each_tensor(arguments_[index], [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) {
        cuda_ = true;
        if (parameter.passed_over) return;
        if (is_plain(tensor)) {
          tensors_.push_back({tensor, parameter, position, list, false, {}});
        } else if (is_compound(tensor)) {
          const auto parts = parts_of(tensor);
          for (const at::Tensor& part : parts)
            tensors_.push_back({part, parameter, position, list, !part.is_same(parts.back()), {}});
          compounds_.emplace_back(tensor, at::Tensor());
        } else {
          plain_ = false;
        }
      } else {
        plain_ = plain_ && tensor.is_cpu() && !parameter.written;
      }
      ++position;
    });
  }
}

void Call::prepare() {
  if (operation_.random) seed_ = seed_of_draw(operation_, arguments_);
  for (Tensor& each : tensors_) {
    const bool small = is_small(each.tensor);
    small_ = small_ && small;
    if (!each.parameter.read) continue;
    const Span span = span_of(each.tensor);
    State state = State::assumed;
    if (!small) {
      if (const auto whole = ranges().uniform(span)) state = whole->state;
    } else if (span.size() == 0) {
      state = State::known;
    } else {
      state = state_of(each.tensor);
      // A program that fills memory by indices does not read what these leave out, or a real GPU
      // would give it rubbish.
      if (each.parameter.written_in_part && ranges().uniform(span)) {
        if (state == State::unwritten) state = State::known;
      }
    }
    note_read(each, state);
  }
  copies_parts_ = operation_.kind == Kind::copy && small_ && compounds_.empty() &&
                  !is_computed(state_) && arguments_[1].toTensor().is_cuda() &&
                  is_partly_computed(arguments_[1].toTensor());
  // What is written in place is kept as it is now: the kernel may itself call operators that write.
  for (Tensor& each : tensors_) {
    if (!each.parameter.written || !is_small(each.tensor)) continue;
    if (!each.parameter.read && !is_read_elsewhere(each)) continue;
    if (!is_computed(state_at(each.position)) && is_inexact(each.tensor)) continue;
    const Span span = span_of(each.tensor);
    ranges().materialize(span);
    each.before.assign(bytes_at(span.begin), bytes_at(span.end));
  }
  prepare_compounds();
}

// What is written in place may get other parts, so that it stands apart from these.
void Call::prepare_compounds() {
  for (auto& [tensor, on_cpu] : compounds_) {
    try {
      const OnCpu guard;
      on_cpu = compound_on_cpu(tensor);
      if (small_ && is_written_argument(tensor)) on_cpu = on_cpu.clone();
    } catch (const std::exception&) {
      small_ = false;  // there is none, so nothing can be executed
    }
  }
}

// What is computed from values that were not computed tells nothing, as long as it decides nothing:
// floating-point results then read as zero as well. Most of a large training's small tensors are of
// this kind.
bool Call::is_worth_executing(const torch::jit::Stack& stack, std::size_t returns) const {
  if (is_computed(state_) || copies_parts_ || operation_.counts_on_device ||
      operation_.name == kUnscale || std::any_of(states_.begin(), states_.end(), is_computed)) {
    return true;
  }
  bool inexact = true;
  for (const Tensor& each : tensors_) {
    inexact = inexact && (!each.parameter.written || is_inexact(each.tensor));
  }
  for (std::size_t index = 0; index < returns; ++index) {
    const c10::IValue& result = stack[stack.size() - returns + index];
    inexact = inexact && (result.isTensor() || result.isTensorList());
    for_each_tensor(result,
                    [&](const at::Tensor& tensor) { inexact = inexact && is_inexact(tensor); });
  }
  return !inexact;
}

void Call::read_inputs() {
  for (const Tensor& each : tensors_) {
    if (each.parameter.read && is_small(each.tensor)) ranges().materialize(span_of(each.tensor));
  }
}

void Call::note_read(const Tensor& each, State state) {
  state_ = std::min(state_, state);
  if (!operation_.lists) return;
  if (states_.empty()) {
    // A scalar may come before the list, as the base of a power.
    const auto list =
        std::find_if(arguments_.begin(), arguments_.end(),
                     [](const c10::IValue& argument) { return argument.isTensorList(); });
    if (list == arguments_.end()) return;
    states_.assign(list->toListRef().size(), State::known);
  }
  if (each.in_list) {
    if (each.position < states_.size())
      states_[each.position] = std::min(states_[each.position], state);
  } else {
    for (State& of : states_) of = std::min(of, state);
  }
}

State Call::state_at(std::size_t position) const {
  const State state = position < states_.size() ? states_[position] : state_;
  return std::max(state, State::assumed);
}

// As in torch.neg(x, out=x).
bool Call::is_read_elsewhere(const Tensor& written) const {
  const Span span = span_of(written.tensor);
  return std::any_of(tensors_.begin(), tensors_.end(), [&](const Tensor& each) {
    const Span other = span_of(each.tensor);
    return each.parameter.read && other.begin < span.end && span.begin < other.end;
  });
}

void Call::restore() {
  for (const Tensor& each : tensors_) {
    if (!each.before.empty()) {
      std::memcpy(bytes_at(span_of(each.tensor).begin), each.before.data(), each.before.size());
    }
  }
}

bool Call::is_written_argument(const at::Tensor& tensor) const {
  for (std::size_t index = 0; index < arguments_.size(); ++index) {
    if (!operation_.parameters[index].written) continue;
    bool found = false;
    for_each_tensor(arguments_[index],
                    [&](const at::Tensor& argument) { found = found || argument.is_same(tensor); });
    if (found) return true;
  }
  return false;
}

std::vector<c10::IValue> Call::results_of_cpu() const {
  std::vector<c10::IValue> values = [&] {
    const OnCpu on_cpu;
    return execute(handle_, operation_, arguments_, seed_, compounds_);
  }();
  for (c10::IValue& value : values) {
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(),
                               tensor.options().device(tensors_.front().tensor.device()));
    });
  }
  return values;
}

bool Call::can_do_without_kernel() const {
  return operation_.on_cpu && compounds_.empty() && !tensors_.empty() &&
         std::none_of(tensors_.begin(), tensors_.end(),
                      [](const Tensor& each) { return each.parameter.written; });
}

State Call::finish(torch::jit::Stack& stack) {
  const std::size_t returns = handle_.schema().returns().size();
  bool all_small = small_;
  for (std::size_t index = 0; index < stored_of(returns); ++index) {
    const c10::IValue& result = stack[stack.size() - returns + index];
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && !is_plain(tensor)) all_small = all_small && is_compound(tensor);
    });
    for_each_part(result, [&](const at::Tensor& part) { all_small = all_small && is_small(part); });
  }
  bool done = false;
  if (operation_.on_cpu || !compounds_.empty()) {
    if (all_small && (!compounds_.empty() || expense_of(operation_, arguments_) <= kExpense)) {
      done = is_worth_executing(stack, returns) && execute_whole(stack, returns);
    } else if (operation_.lists) {
      done = is_worth_executing(stack, returns);
      if (done) execute_lists(stack, returns);
    } else if (operation_.pointwise || operation_.reduces_uniform) {
      done = execute_uniform(stack, returns);
    }
  }
  if (done && copies_parts_) {
    const OnCpu on_cpu;
    note_copied(arguments_[1].toTensor(), arguments_[0].toTensor());
  }
  if (!done) {
    note_results_not_computed(stack, returns);
    if (operation_.name == "aten::_coalesce")
      return coalesce_indices(stack.back().toTensor()) ? State::known : State::assumed;
    if (compounds_.size() > 1 && stack.back().isTensor() && is_compound(stack.back().toTensor()))
      count_assumed_shape(operation_.name);
    if (operation_.counts_on_device)
      give_bound(operation_, arguments_, &stack[stack.size() - returns], returns);
  }
  if (operation_.name == kUnscale) {
    // No gradient that was not computed is taken to overflow, so that a GradScaler's scale is
    // known.
    note_written(arguments_[1].toTensor(), State::known);
  }
  if (done && is_computed(state_)) return state_;
  choose_indices(operation_, arguments_, &stack[stack.size() - returns], returns);
  return State::assumed;
}

bool Call::execute_whole(torch::jit::Stack& stack, std::size_t returns) {
  c10::IValue* const results = &stack[stack.size() - returns];
  read_inputs();
  restore();
  try {
    std::vector<c10::IValue> values = [&] {
      const OnCpu on_cpu;
      return execute(handle_, operation_, arguments_, seed_, compounds_);
    }();
    if (operation_.counts_on_device && !is_computed(state_))
      take_every_element_for_none(operation_, arguments_, values);
    // Of operators of other libraries it is not known which of them count.
    if (operation_.counts_on_device || !operation_.name.starts_with("aten::")) {
      bool other = false;
      for (std::size_t index = 0; index < returns; ++index)
        other = give_shape_of(operation_, values[index], results[index]) || other;
      if (other && !operation_.counts_on_device && !is_computed(state_))
        count_assumed_shape(operation_.name);
    }
    const OnCpu on_cpu;
    for (std::size_t index = 0; index < stored_of(returns); ++index) {
      const c10::IValue& value = values[index];
      c10::IValue& result = results[index];
      if (result.isTensor() && value.isTensor()) {
        store(result.toTensor(), value.toTensor(), state_at(0));
      } else if (result.isTensorList() && value.isTensorList()) {
        const auto outputs = result.toTensorVector();
        const auto computed = value.toTensorVector();
        TORCH_CHECK(outputs.size() == computed.size(), "as many results as on the CPU");
        for (std::size_t each = 0; each < outputs.size(); ++each)
          store(outputs[each], computed[each], state_at(each));
      } else if (!value.isNone()) {
        result = value;
      } else {
        for_each_tensor(result,
                        [&](const at::Tensor& tensor) { keep_for_backward(tensor, value); });
      }
    }
    if (operation_.kept >= 0) {
      const auto kept = static_cast<std::size_t>(operation_.kept);
      keep_for_backward(results[kept].toTensor(), values[kept]);
    }
    note_arguments_written();
  } catch (const std::exception& error) {
    if (state_ == State::known) error_ = error_of_gpu(operation_, error);
    count_failure(operation_.name);
    restore();
    return false;
  }
  return true;
}

std::size_t Call::stored_of(std::size_t returns) const {
  return operation_.kept < 0 ? returns : static_cast<std::size_t>(operation_.kept);
}

void Call::execute_lists(torch::jit::Stack& stack, std::size_t returns) {
  SmallPart part(arguments_);
  note_results_not_computed(stack, returns);
  if (part.empty()) return;
  read_inputs();
  restore();
  std::vector<c10::IValue> values;
  try {
    const OnCpu on_cpu;
    values = execute(handle_, operation_, part.arguments(), seed_);
    for (std::size_t index = 0; index < returns; ++index) {
      part.for_each_result(
          stack[stack.size() - returns + index], values[index],
          [&](const at::Tensor& output, const at::Tensor& value, std::size_t position) {
            if (is_small(output)) store(output, value, state_at(position));
          });
    }
    for (const Tensor& each : tensors_) {
      if (each.parameter.written && each.in_list && part.keeps(each.position)) {
        note_written(each.tensor, state_at(each.position));
      }
    }
  } catch (const std::exception&) {
    count_failure(operation_.name);
    restore();
  }
}

bool Call::execute_uniform(torch::jit::Stack& stack, std::size_t returns) {
  try {
    return evaluate_uniform(handle_, operation_, arguments_, &stack[stack.size() - returns],
                            returns);
  } catch (const std::exception&) {
    count_failure(operation_.name);
    return false;
  }
}

}  // namespace opacus_memprof::virtual_values
