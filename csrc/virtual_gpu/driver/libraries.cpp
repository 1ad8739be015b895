// SPDX-License-Identifier: Apache-2.0
// Libraries of kernels, as cuDNN loads what it has compiled: nothing is read of them.
#include <cuda.h>

#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::make_handle;

extern "C" {

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* /*code*/,
                                   CUjit_option* /*jit_options*/, void** /*jit_values*/,
                                   unsigned /*jit_count*/, CUlibraryOption* /*options*/,
                                   void** /*values*/, unsigned /*count*/) {
  make_handle(library);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary /*library*/, const char* /*name*/) {
  make_handle(kernel);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction* function, CUkernel /*kernel*/) {
  make_handle(function);
  return CUDA_SUCCESS;
}
}
