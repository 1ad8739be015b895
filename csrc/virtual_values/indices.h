// SPDX-License-Identifier: Apache-2.0
// Shapes and indices that depend on data, where the data were not computed.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <vector>

#include "virtual_values/operation.h"

namespace opacus_memprof::virtual_values {

// Gives a result of the CUDA kernel, which found no count, the shape of the one that was computed.
// Answers whether it is another one.
bool give_shape_of(const Operation& operation, const c10::IValue& value, c10::IValue& result);

// Values that were not computed gave an empty result, which is not an upper bound: replaces it by
// the result that all elements would give. Counts the use.
void take_every_element_for_none(const Operation& operation,
                                 const std::vector<c10::IValue>& arguments,
                                 std::vector<c10::IValue>& values);

// Gives the results of a call on large tensors the bound: every element for `nonzero`, one for
// `unique`. Counts the use.
void give_bound(const Operation& operation, const std::vector<c10::IValue>& arguments,
                c10::IValue* results, std::size_t returns);

// Indices chosen by values that were not computed (`topk`, `argmax`, `max` over a dimension) go
// round robin over the rows, as a router chooses that balances its load. Counts the use.
void choose_indices(const Operation& operation, const std::vector<c10::IValue>& arguments,
                    c10::IValue* results, std::size_t returns);

}  // namespace opacus_memprof::virtual_values
