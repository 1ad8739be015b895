// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/uniform.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "virtual_values/execute.h"
#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

struct Element {
  at::Tensor tensor;  // of the CPU
  State state = State::known;
};

at::Tensor one_element(const at::Tensor& like) {
  const std::vector<std::int64_t> ones(static_cast<std::size_t>(like.dim()), 1);
  return at::empty(ones, at::TensorOptions().dtype(like.scalar_type()).device(at::kCPU));
}

// What all elements of the tensor are; nothing where they differ.
std::optional<Element> element_of(const at::Tensor& tensor, bool read) {
  if (tensor.is_cpu())
    return tensor.numel() == 1 ? std::optional(Element{tensor, State::known}) : std::nullopt;
  if (!is_plain(tensor) || tensor.is_conj() || tensor.is_neg() || span_of(tensor).size() == 0)
    return std::nullopt;
  Element element{one_element(tensor), State::known};
  auto* const bytes = static_cast<std::uint8_t*>(element.tensor.data_ptr());
  const Span span = span_of(tensor);
  std::memset(bytes, 0, tensor.itemsize());
  if (!read) return element;
  if (tensor.numel() == 1) {
    element.state = ranges().materialize(span);
    std::memcpy(bytes, reinterpret_cast<const void*>(span.begin), tensor.itemsize());  // NOLINT
    return element;
  }
  const auto whole = ranges().uniform(span);
  if (!whole) {
    // Of a large tensor little can have been written: the rest reads as zero.
    if (is_small(tensor)) return std::nullopt;
    element.state = State::assumed;
    return element;
  }
  element.state = std::max(whole->state, State::assumed);
  for (std::size_t index = 0; index < static_cast<std::size_t>(tensor.itemsize()); ++index) {
    bytes[index] = whole->pattern.bytes[index % whole->pattern.size];
  }
  return element;
}

bool repeats(const at::Tensor& output, const at::Tensor& value, State state) {
  if (!output.defined() || !value.defined() || value.numel() != 1 ||
      value.scalar_type() != output.scalar_type() || output.itemsize() > 16 || !is_dense(output)) {
    return false;
  }
  const Span span = span_of(output);
  if (span.size() == 0) return output.numel() == 0;
  Uniform uniform{state, {.bytes = {}, .size = static_cast<std::uint8_t>(output.itemsize())}};
  std::memcpy(uniform.pattern.bytes.data(), value.const_data_ptr(), output.itemsize());
  ranges().set_uniform(span, uniform);
  return true;
}

}  // namespace

bool evaluate_uniform(const c10::OperatorHandle& handle, const Operation& operation,
                      const std::vector<c10::IValue>& arguments, const c10::IValue* results,
                      std::size_t returns) {
  if (operation.random || returns == 0) return false;
  bool floating = true;
  for (std::size_t index = 0; index < returns; ++index) {
    if (!results[index].isTensor() || !is_plain(results[index].toTensor())) return false;
    const at::ScalarType type = results[index].toTensor().scalar_type();
    floating = floating && (at::isFloatingType(type) || at::isComplexType(type));
  }
  const OnCpu on_cpu;
  State state = State::known;
  std::vector<c10::IValue> elements = arguments;
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    if (arguments[index].isList() && !arguments[index].isIntList() &&
        !arguments[index].isBoolList())
      return false;
    if (!arguments[index].isTensor() || !arguments[index].toTensor().defined()) continue;
    const auto element = element_of(arguments[index].toTensor(), operation.parameters[index].read);
    if (!element) return false;
    state = std::min(state, element->state);
    if (!is_computed(state) && floating) return false;
    elements[index] = element->tensor;
  }
  const auto values = execute(handle, operation, elements, 0);
  for (std::size_t index = 0; index < returns; ++index) {
    if (!values[index].isTensor() ||
        !repeats(results[index].toTensor(), values[index].toTensor(), state))
      return false;
  }
  return true;
}

}  // namespace opacus_memprof::virtual_values
