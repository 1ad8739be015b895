// SPDX-License-Identifier: Apache-2.0
#include "hooks/inputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include "allocators/tensor.h"
#include "core/tag.h"
#include "hooks/tensors_in.h"

namespace opacus_memprof {

namespace {

constexpr std::uint64_t kUnclaimed =
    set_of(Category::unattributed) | set_of(Category::forward_undecided);

void retag_as_inputs(PyObject* tensor, std::uint64_t expected) {
  retag_tensor(tensor, static_cast<std::uint8_t>(Category::inputs), kKeep16, expected);
}

}  // namespace

std::pair<std::int64_t, std::int64_t> tag_inputs(PyObject* batch) {
  std::int64_t samples = -1;
  std::int64_t elements = 0;
  const TensorsIn found(batch);
  for (PyObject* object : found) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.requires_grad()) continue;
    retag_as_inputs(object, kUnclaimed);
    // Sizes may be symbols, and nested tensors have none.
    if (tensor.is_nested()) continue;
    if (samples < 0 && tensor.dim() > 0) samples = tensor.sym_size(0).maybe_as_int().value_or(-1);
    elements += tensor.sym_numel().maybe_as_int().value_or(0);
  }
  return {samples, elements};
}

void tag_target(PyObject* target) {
  if (!THPVariable_CheckExact(target) || THPVariable_Unpack(target).requires_grad()) return;
  retag_as_inputs(target, held_by_program_alone(THPVariable_Unpack(target))
                              ? kUnclaimed
                              : set_of(Category::unattributed));
}

}  // namespace opacus_memprof
