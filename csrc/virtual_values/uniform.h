// SPDX-License-Identifier: Apache-2.0
// Operators on tensors that are too large to execute them, but whose elements are all equal.
//
// What was not computed reads as zero, so that this holds for most large tensors:
// `isfinite(x).all()` of a large result is True as it is of a small one, and a mask of ones stays
// one.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <vector>

#include "virtual_values/operation.h"

namespace opacus_memprof::virtual_values {

// Carries a pointwise operator, or a reduction that keeps a repeated value, out on one element of
// each argument, and notes that the results repeat what it gives. False where an argument has
// elements of its own, or where the results would only be further values that were not computed.
bool evaluate_uniform(const c10::OperatorHandle& handle, const Operation& operation,
                      const std::vector<c10::IValue>& arguments, const c10::IValue* results,
                      std::size_t returns);

}  // namespace opacus_memprof::virtual_values
