// SPDX-License-Identifier: Apache-2.0
// What stands in on the CPU for operators that have a kernel for CUDA alone, as fused attention and
// cuDNN's recurrent layers, or whose kernel for CUDA saves something else, as normalizations.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace opacus_memprof::virtual_values {

// Gives the results for arguments that are on the CPU; None for a result that it does not compute.
// Throws where it cannot stand in for the operator with these arguments.
using Counterpart = std::vector<c10::IValue> (*)(const std::vector<c10::IValue>& arguments);

// The operator's name includes that of its overload, if that has one. nullptr where the operator
// itself is executed.
Counterpart counterpart_of(const std::string& operation);

}  // namespace opacus_memprof::virtual_values
