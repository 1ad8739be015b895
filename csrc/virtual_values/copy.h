// SPDX-License-Identifier: Apache-2.0
// Copies between the host and the virtual GPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

// Whether this call of aten::copy_ has a plain tensor of the device on one side and a tensor of the
// CPU on the other.
bool is_copy_between_host_and_device(const torch::jit::Stack& stack);

// Copies the values alone.
State copy_values_between_host_and_device(const torch::jit::Stack& stack);

// Calls the CUDA kernel and makes the copy true: what was not computed arrives as zeros. Answers
// what the host knows of what it read; `known` for copies to the device.
State copy_between_host_and_device(const c10::OperatorHandle& handle, c10::DispatchKeySet below,
                                   torch::jit::Stack& stack);

}  // namespace opacus_memprof::virtual_values
