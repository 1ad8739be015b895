// SPDX-License-Identifier: Apache-2.0
// What a call leaves in the bytes of its results and of the arguments that it writes.
#include <ATen/ops/_coalesce.h>

#include <cstring>

#include "virtual_values/call.h"
#include "virtual_values/counts.h"
#include "virtual_values/parts.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {

// Stores a result that only the operator's own backward reads. The counterpart of that backward
// reads at most its beginning.
void Call::keep_for_backward(const at::Tensor& output, const c10::IValue& value) const {
  if (!is_plain(output) || !is_dense(output)) return;
  Span span = span_of(output);
  ranges().set_uniform(span, {state_at(0), {.bytes = {}, .size = 1}});
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor& beginning = value.toTensor();
  span.end = span.begin + beginning.nbytes();
  ranges().set(span, state_at(0));
  std::memcpy(bytes_at(span.begin), beginning.const_data_ptr(), span.size());
}

// Writes a result's value into its bytes, unless the result is an argument.
void Call::store(const at::Tensor& output, const at::Tensor& value, State state) const {
  if (!output.defined() || !value.defined() || is_written_argument(output)) return;
  if (output.is_cpu()) {
    // The state of a generator, which attention passes to its backward.
    if (output.sizes() == value.sizes()) output.copy_(value);
    return;
  }
  if (!is_plain(output)) return store_compound(output, value, state);
  const bool widened = is_half(output) && value.scalar_type() == at::kFloat;
  if (output.sizes() != value.sizes() ||
      (output.scalar_type() != value.scalar_type() && !widened)) {
    // On one of the two devices, some kernels leave out a result that only their backward reads.
    if (is_computed(state) && output.numel() > 0) count_failure(operation_.name);
    return note_not_computed(output);
  }
  if (output.numel() == 0) return;
  const at::Tensor alias = alias_on_cpu(output);
  if (!is_computed(state)) make_finite(value);
  if (output.scalar_type() == value.scalar_type() && output.strides() == value.strides() &&
      is_dense(output) && output.is_conj() == value.is_conj() &&
      output.is_neg() == value.is_neg()) {
    std::memcpy(bytes_at(span_of(output).begin), value.const_data_ptr(), span_of(output).size());
  } else {
    alias.copy_(value);
  }
  note_written(output, state);
}

void Call::note_arguments_written() {
  const OnCpu on_cpu;
  for (const Tensor& each : tensors_) {
    if (!each.parameter.written || !is_small(each.tensor)) continue;
    const State state = state_at(each.in_list ? each.position : 0);
    if (!is_computed(state) && !copies_parts_) make_finite(alias_on_cpu(each.tensor));
    note_written(each.tensor, state);
  }
  for (const auto& [tensor, value] : compounds_) {
    if (is_written_argument(tensor)) store_compound(tensor, value, state_at(0));
  }
}

// Writes a sparse or nested tensor part for part. Where the number of elements depends on data, the
// parts are allocated again: the GPU's kernel could not know it.
void Call::store_compound(const at::Tensor& output, const at::Tensor& value, State state) const {
  const auto values = parts_of(value);
  auto outputs = parts_of(output);
  TORCH_CHECK(output.layout() == value.layout() && outputs.size() == values.size(),
              "a result as on the CPU");
  std::vector<std::vector<std::int64_t>> sizes;
  bool same = true;
  for (std::size_t index = 0; index < values.size(); ++index) {
    sizes.push_back(values[index].sizes().vec());
    same = same && outputs[index].sizes() == values[index].sizes();
  }
  if (!same) outputs = allocate_parts(output, sizes);
  for (std::size_t index = 0; index < values.size(); ++index) {
    if (outputs[index].numel() == 0) continue;
    if (!is_computed(state)) make_finite(values[index]);
    alias_on_cpu(outputs[index]).copy_(values[index]);
    note_written(outputs[index], state);
  }
  set_coalesced(output, is_coalesced(value));
}

// If the indices of a sparse tensor are known, so is the number of different ones, however large
// its values are. Otherwise it is assumed that all of them differ.
bool Call::coalesce_indices(const at::Tensor& output) {
  const at::Tensor& input = arguments_[0].toTensor();
  const auto before = parts_of(input);
  const bool known =
      is_small(before[0]) && ranges().materialize(span_of(before[0])) == State::known;
  if (!known) count_assumed_shape(operation_.name);
  const OnCpu on_cpu;
  const at::Tensor indices =
      known ? parts_of(at::_coalesce(indices_on_cpu(input)))[0] : alias_on_cpu(before[0]);
  auto of_values = before[1].sizes().vec();
  of_values[0] = indices.size(1);
  const auto parts = allocate_parts(output, {indices.sizes().vec(), of_values});
  set_coalesced(output, true);
  note_not_computed(parts[0]);
  if (known) {
    alias_on_cpu(parts[0]).copy_(indices);
    note_written(parts[0], State::known);
  }
  note_not_computed(parts[1]);
  return known;
}

void Call::note_results_not_computed(const torch::jit::Stack& stack, std::size_t returns) {
  for (const Tensor& each : tensors_) {
    if (!each.parameter.written || each.indices) continue;
    const auto whole = ranges().uniform(span_of(each.tensor));
    if (each.parameter.read && is_small(each.tensor) && (!whole || is_computed(whole->state))) {
      ranges().materialize(span_of(each.tensor));  // it keeps its bytes
      note_written(each.tensor, State::assumed);
    } else {
      note_not_computed(each.tensor);
    }
  }
  const std::size_t fresh = operation_.kept < 0 ? returns : stored_of(returns) + 1;
  for (std::size_t index = 0; index < fresh; ++index) {
    for_each_tensor(stack[stack.size() - returns + index], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda() || is_written_argument(tensor)) return;
      // The indices have been noted by the operators that the kernel calls.
      if (const auto parts = parts_of(tensor); !parts.empty() && is_plain(parts.back()))
        note_not_computed(parts.back());
    });
  }
}

}  // namespace opacus_memprof::virtual_values
