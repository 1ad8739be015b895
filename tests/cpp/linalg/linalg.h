// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace opacus_memprof::testing {

// From the library libtorch_cuda_linalg (linalg.cpp).
__attribute__((visibility("default"))) c10::DataPtr workspace_of_linalg(std::size_t bytes);

}  // namespace opacus_memprof::testing
