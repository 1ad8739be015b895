// SPDX-License-Identifier: Apache-2.0
// Tensors of the virtual GPU as memory: where their bytes are, and tensors of the CPU over the same
// bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <optional>

#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

// The largest tensors of executed operations. The virtual GPU copies and fills up to this size.
std::size_t small_bytes();

Ranges& ranges();

// Returns whether a tensor wraps others, on which it calls the operators.
bool is_wrapper(const at::Tensor& tensor);

// Half or bfloat16, in which a GPU stores what its kernels compute in float.
bool is_half(const at::Tensor& tensor);

// Returns whether a tensor is on the virtual GPU, and its bytes are its elements.
bool is_plain(const at::Tensor& tensor);

Span span_of(const at::Tensor& tensor);
bool is_small(const at::Tensor& tensor);

// Returns whether there are no gaps between the elements of a tensor.
bool is_dense(const at::Tensor& tensor);

// The CPU tensor over the bytes of a plain one. Shares no storage with it, so it must not outlive
// it.
at::Tensor alias_on_cpu(const at::Tensor& tensor);

// Like `alias_on_cpu`, on any device.
at::Tensor alias_on(const at::Tensor& tensor, c10::Device device);

// Makes values finite that were not computed: what a program checks of them then holds.
void make_finite(const at::Tensor& tensor);

// Returns the lowest state of the elements. Of a tensor with gaps these do not count, unless it has
// too many pieces to be asked one by one.
State state_of(const at::Tensor& tensor);

// Notes that the elements have been written. Elements that are not next to each other are noted
// each, if they are few.
void note_written(const at::Tensor& tensor, State state);
// Returns whether some elements of a small tensor were computed and others were not, those between
// its elements included.
bool is_partly_computed(const at::Tensor& tensor);
// Notes that a small tensor was copied, each element with its own state.
void note_copied(const at::Tensor& from, const at::Tensor& to);
// Notes that the elements were written with values that were not computed; they read as zero.
void note_not_computed(const at::Tensor& tensor);

// Returns the value with function(tensor) instead of each tensor; values of other types as they
// are.
template <typename Function>
c10::IValue with_tensors(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Calls function(tensor) for each defined tensor in the value, which may be a list of lists of
// them.
template <typename Function>
void for_each_tensor(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) function(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isNone() && !element.isList()) return;
      for_each_tensor(element, function);
    }
  }
}

}  // namespace opacus_memprof::virtual_values
