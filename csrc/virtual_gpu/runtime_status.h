// SPDX-License-Identifier: Apache-2.0
// The error that cudaGetLastError returns, one for each thread.
#pragma once

#include <driver_types.h>

namespace virtual_gpu {

cudaError_t& last_error();
cudaError_t fail(cudaError_t error);  // remembers it, and returns it

}  // namespace virtual_gpu
