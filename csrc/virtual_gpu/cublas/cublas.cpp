// SPDX-License-Identifier: Apache-2.0
// libcublas and libcublasLt: handles and descriptors. Their workspaces are torch's, which allocates
// them itself.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>

#include "virtual_gpu/machine/machine.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

using virtual_gpu::current_device;
using virtual_gpu::machine;
using virtual_gpu::make_handle;

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  machine().memory.create_cublas_handle(current_device());
  make_handle(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t /*handle*/, int* version) {
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t /*handle*/, cublasMath_t* mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t /*handle*/, cublasPointerMode_t* mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}

std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  make_handle(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* descriptor,
                                        cublasComputeType_t /*compute*/, cudaDataType_t /*scale*/) {
  make_handle(descriptor);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType /*type*/,
                                          std::uint64_t /*rows*/, std::uint64_t /*columns*/,
                                          std::int64_t /*leading*/) {
  make_handle(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  make_handle(preference);
  return CUBLAS_STATUS_SUCCESS;
}

// One algorithm, which needs nothing beyond the workspace that torch offers.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t /*handle*/, cublasLtMatmulDesc_t /*operation*/, cublasLtMatrixLayout_t /*a*/,
    cublasLtMatrixLayout_t /*b*/, cublasLtMatrixLayout_t /*c*/, cublasLtMatrixLayout_t /*d*/,
    cublasLtMatmulPreference_t /*preference*/, int /*most*/,
    cublasLtMatmulHeuristicResult_t found[], int* count) {
  std::memset(found, 0, sizeof found[0]);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
}
