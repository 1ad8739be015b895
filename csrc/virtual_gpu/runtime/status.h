// SPDX-License-Identifier: Apache-2.0
// The error that cudaGetLastError returns, one for each thread.
#pragma once

#include <driver_types.h>

namespace opacus_memprof::virtual_gpu {

cudaError_t& last_error();
cudaError_t fail(cudaError_t error);  // remembers it, and returns it

// Memory that cudaMallocAsync gave out may be freed by cudaFree; false where no pool knows the
// address.
bool release_from_pool(void* address);

}  // namespace opacus_memprof::virtual_gpu
