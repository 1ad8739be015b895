// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/indices.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "virtual_values/counts.h"
#include "virtual_values/execute.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

bool is_nonzero(const Operation& operation) { return operation.name == "aten::nonzero"; }

// Of memory that the CUDA kernel has given, and that grows where it is not enough.
void resize(const Operation& operation, const at::Tensor& output, at::IntArrayRef sizes) {
  if (output.sizes() == sizes) return;
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet(c10::DispatchKey::Fake));
  output.resize_(sizes);
  if (is_nonzero(operation) && sizes.size() == 2) {
    // The CUDA kernel writes a row for each dimension and returns the transpose.
    output.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, {1, sizes[0]});
  }
}

bool has_no_rows(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().dim() > 0 && value.toTensor().size(0) == 0;
}

// The chosen indices of each row, as many as `output` has along `dimension`, of `count` that there
// are.
void write_round_robin(const at::Tensor& output, std::int64_t dimension, std::int64_t count,
                       State state) {
  if (output.numel() == 0 || count == 0 || !is_plain(output) || !is_small(output)) return;
  const OnCpu on_cpu;
  const at::Tensor alias = alias_on_cpu(output);
  const at::Tensor rows_last = alias.dim() > 0 ? alias.movedim(dimension, -1) : alias;
  at::Tensor indices =
      at::arange(output.numel(), at::TensorOptions().dtype(at::kLong)).remainder(count);
  rows_last.copy_(indices.view(rows_last.sizes()));
  note_written(output, state);
}

}  // namespace

bool give_shape_of(const Operation& operation, const c10::IValue& value, c10::IValue& result) {
  if (!value.isTensor() || !result.isTensor() || !is_plain(result.toTensor()) ||
      result.toTensor().sizes() == value.toTensor().sizes())
    return false;
  resize(operation, result.toTensor(), value.toTensor().sizes());
  return true;
}

void take_every_element_for_none(const Operation& operation,
                                 const std::vector<c10::IValue>& arguments,
                                 std::vector<c10::IValue>& values) {
  count_assumed_shape(operation.name);
  const at::Tensor& input = arguments[0].toTensor();
  if (is_nonzero(operation) && has_no_rows(values[0]) && input.numel() > 0) {
    const OnCpu on_cpu;
    values[0] = at::nonzero(at::ones(input.sizes(), at::TensorOptions().dtype(at::kBool)));
  }
}

void give_bound(const Operation& operation, const std::vector<c10::IValue>& arguments,
                c10::IValue* results, std::size_t returns) {
  count_assumed_shape(operation.name);
  const at::Tensor& input = arguments[0].toTensor();
  if (is_nonzero(operation)) {
    resize(operation, results[0].toTensor(), {input.numel(), input.dim()});
    return note_not_computed(results[0].toTensor());
  }
  for (std::size_t index = 0; index < returns; ++index) {
    const at::Tensor& output = results[index].toTensor();
    if (output.dim() == 0 || output.size(0) != 0 || input.numel() == 0) continue;
    auto sizes = output.sizes().vec();
    sizes[0] = 1;
    resize(operation, output, sizes);
    note_not_computed(output);
  }
}

void choose_indices(const Operation& operation, const std::vector<c10::IValue>& arguments,
                    c10::IValue* results, std::size_t returns) {
  const bool topk = operation.name == "aten::topk";
  const bool best = operation.name == "aten::max" || operation.name == "aten::min";
  const bool arg = operation.name == "aten::argmax" || operation.name == "aten::argmin";
  if ((!topk && !best && !arg) || arguments.size() < 2) return;
  const std::size_t position = topk ? 2 : 1;
  if (!arguments[0].isTensor() || position >= arguments.size() || !arguments[position].isInt())
    return;
  const at::Tensor& input = arguments[0].toTensor();
  std::int64_t dimension = arguments[position].toInt();
  if (input.dim() == 0) return;
  if (dimension < 0) dimension += input.dim();
  const at::Tensor& output = results[returns - 1].toTensor();
  if (output.scalar_type() != at::kLong) return;
  if (topk) {
    count_assumed_shape(operation.name);
    return write_round_robin(output, dimension, input.size(dimension), State::known);
  }
  // One index for each row, with the dimension kept as one element or dropped.
  write_round_robin(output, output.dim() == input.dim() ? dimension : output.dim() - 1,
                    input.size(dimension), State::assumed);
}

}  // namespace opacus_memprof::virtual_values
