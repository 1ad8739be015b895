// SPDX-License-Identifier: Apache-2.0
// The error that cudaGetLastError returns, one for each thread.
#pragma once

#include <driver_types.h>

namespace opacus_memprof::virtual_gpu {

cudaError_t& last_error();
// Remembers the error and returns it; the one of a forked process, where no call can succeed.
cudaError_t fail(cudaError_t error);
// cudaSuccess where the driver works in this process, otherwise the error that says why not.
cudaError_t ready();

// Memory that cudaMallocAsync gave out may be freed by cudaFree; false where no pool knows the
// address.
bool release_from_pool(void* address);

}  // namespace opacus_memprof::virtual_gpu
