// SPDX-License-Identifier: Apache-2.0
// Names and descriptions of errors, as the replaced libraries give them.
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

namespace {

struct Error {
  int code;
  const char* name;
  const char* description;
};

// build.py writes errors.inc: every cudaError of the CUDA runtime that torch was built for, with
// the runtime's own words, every CUresult of cuda.h, and every cublasStatus_t of cublas_api.h.
constexpr Error kRuntime[] = {
#define RUNTIME_ERROR(code, name, description) {code, name, description},
#include "errors.inc"
#undef RUNTIME_ERROR
};
constexpr Error kDriver[] = {
#define DRIVER_ERROR(name, description) {name, #name, description},
#include "errors.inc"
#undef DRIVER_ERROR
};
constexpr Error kCublas[] = {
#define CUBLAS_ERROR(name) {name, #name, #name},
#include "errors.inc"
#undef CUBLAS_ERROR
};

template <std::size_t count>
const Error* find(const Error (&errors)[count], int code) {
  const auto* const found = std::find_if(std::begin(errors), std::end(errors),
                                         [&](const Error& error) { return error.code == code; });
  return found == std::end(errors) ? nullptr : found;
}

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  const Error* const found = find(kRuntime, error);
  return found == nullptr ? "unrecognized error code" : found->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const Error* const found = find(kRuntime, error);
  return found == nullptr ? "unrecognized error code" : found->description;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  const Error* const found = find(kDriver, error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** description) {
  const Error* const found = find(kDriver, error);
  *description = found == nullptr ? nullptr : found->description;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

const char* cublasGetStatusName(cublasStatus_t status) {
  const Error* const found = find(kCublas, status);
  return found == nullptr ? "CUBLAS_STATUS_UNKNOWN" : found->name;
}

const char* cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }
}
