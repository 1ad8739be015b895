// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/lists.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {
namespace {

bool is_usable(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_cpu() || (is_plain(tensor) && is_small(tensor));
}

}  // namespace

SmallPart::SmallPart(const std::vector<c10::IValue>& arguments) : all_(arguments) {
  if (arguments.empty() || !arguments[0].isTensorList()) return;
  length_ = arguments[0].toTensorVector().size();
  std::vector<bool> small(length_, true);
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && !is_usable(argument.toTensor())) return;
    if (!argument.isList() || argument.toListRef().size() != length_) continue;
    const auto elements = argument.toListRef();
    for (std::size_t index = 0; index < length_; ++index) {
      small[index] =
          small[index] && (!elements[index].isTensor() || is_usable(elements[index].toTensor()));
    }
  }
  for (std::size_t index = 0; index < length_; ++index) {
    if (small[index]) kept_.push_back(index);
  }
}

std::vector<c10::IValue> SmallPart::arguments() const {
  std::vector<c10::IValue> arguments;
  for (const c10::IValue& argument : all_) {
    if (!argument.isList() || argument.toListRef().size() != length_) {
      arguments.push_back(argument);
      continue;
    }
    const auto list = argument.toList();
    c10::List<c10::IValue> part(list.elementType());
    for (const std::size_t index : kept_) part.push_back(list.get(index));
    arguments.emplace_back(std::move(part));
  }
  return arguments;
}

}  // namespace opacus_memprof::virtual_values
