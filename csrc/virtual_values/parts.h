// SPDX-License-Identifier: Apache-2.0
// Tensors that are not one piece of memory: sparse, nested and quantized ones. Each has its
// elements in plain tensors, its parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

#include "virtual_values/tensors.h"

namespace opacus_memprof::virtual_values {

// The indices and values of a sparse tensor, the values last; the buffer of a nested or quantized
// one; of any other strided tensor itself. On any device. Empty for what wraps other tensors.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor);

// Returns whether a tensor of the virtual GPU is not plain, but all of its parts are.
bool is_compound(const at::Tensor& tensor);

// Returns a tensor of the same kind on the CPU, whose parts share the bytes. It must not outlive
// `tensor`. Throws if the CPU has no such kind.
at::Tensor compound_on_cpu(const at::Tensor& tensor);

// Returns a sparse tensor of coordinates with the same indices and with values without elements,
// for computations that need the indices only.
at::Tensor indices_on_cpu(const at::Tensor& tensor);

// Gives a sparse tensor new parts, which are allocated on its device with these sizes.
std::vector<at::Tensor> allocate_parts(const at::Tensor& tensor,
                                       const std::vector<std::vector<std::int64_t>>& sizes);

bool is_coalesced(const at::Tensor& tensor);
void set_coalesced(const at::Tensor& tensor, bool coalesced);

// Calls function(part) for the parts on the virtual GPU of each tensor in the value.
template <typename Function>
void for_each_part(const c10::IValue& value, Function&& function) {
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.is_cuda()) return;
    if (is_plain(tensor)) return function(tensor);
    if (!is_compound(tensor)) return;
    for (const at::Tensor& part : parts_of(tensor)) function(part);
  });
}

}  // namespace opacus_memprof::virtual_values
