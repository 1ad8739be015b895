// SPDX-License-Identifier: Apache-2.0
// The autograd node on the output of a layer that flash_clip clips.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace opacus_memprof::clipping {

// Returns `output` with a new node in the graph, which is the identity. Its backward calls
// `receive(call, input, gradient)` with the output's gradient, unless `is_backward_of_inputs` and
// it does not require grad. The result is not a view of
// `output`, so that an in-place activation may follow.
//
// `anchor` makes the result require grad if `output` does not. `input` is saved through autograd,
// so that activation checkpointing, saved-tensor hooks and the check for in-place changes apply to
// it as to any activation, and it is freed after the backward. `receive` gets None if there is no
// input.
at::Tensor tap_gradient(const at::Tensor& output, const std::optional<at::Tensor>& anchor,
                        const std::optional<at::Tensor>& input, pybind11::object receive,
                        pybind11::object call);

// Whether the backward that runs in this thread computes gradients of some tensors only, as
// `torch.autograd.grad` does: parameters get none in it, and layers have nothing to keep. False
// where no backward runs.
bool is_backward_of_inputs();

}  // namespace opacus_memprof::clipping
