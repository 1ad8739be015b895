// SPDX-License-Identifier: Apache-2.0
// CUDA graphs: nothing is executed while one is captured, and each replay executes the captured
// operations over the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <vector>

#include "virtual_values/operation.h"
#include "virtual_values/ranges.h"

namespace opacus_memprof::virtual_values {

// Whether any graph is being captured.
bool is_capturing();

// Whether what this thread launches with these arguments goes into a graph.
bool is_captured(const std::vector<c10::IValue>& arguments);

// Adds a call that was captured, with its results, to its graph. Keeps none of their memory alive.
void capture_call(const c10::OperatorHandle& handle, const Operation& operation,
                  const std::vector<c10::IValue>& arguments,
                  const std::vector<c10::IValue>& results);

// A kernel that no operator has launched writes the tensor: its values are unknown, from now on or,
// where its stream is captured, from each replay on.
void note_written_by_kernel(const at::Tensor& tensor);

// Where `stream` is captured, adds what a new block needs to the graph, and answers true.
bool capture_allocation(void* stream, std::function<void()> work);

}  // namespace opacus_memprof::virtual_values
