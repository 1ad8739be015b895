// SPDX-License-Identifier: Apache-2.0
// The libcudnn that torch brings, which is asked what the program asks, for a GPU that is only
// described to it.
//
// Since 9.8 cuDNN chooses engines and builds execution plans for a GPU that is not there, from a
// description of it
// ("deviceless ahead-of-time compilation"). So plans, their engines and their workspaces are those
// of the real library, for every shape and for every GPU; nothing of it is ever executed.
#pragma once

#include <cudnn.h>
#include <cudnn_backend.h>

#include "virtual_gpu/defaults/defaults.h"

namespace opacus_memprof::virtual_gpu {

// The address of a function of the real libcudnn; nullptr if it has none of that name.
void* cudnn_symbol(const char* name);

// That function, with the type of the one of ours that has the same name.
template <class Function>
Function* cudnn_function(Function* /*ours*/, const char* name) {
  return reinterpret_cast<Function*>(cudnn_symbol(name));
}

// The GPU of the machine as cuDNN's descriptor of one, finalized; nullptr where cuDNN cannot make
// it.
cudnnBackendDescriptor_t cudnn_device();

}  // namespace opacus_memprof::virtual_gpu

// Calls the real function of the same name, which is looked up once.
#define VIRTUAL_GPU_CUDNN(name, ...)                                                       \
  [&] {                                                                                    \
    const opacus_memprof::virtual_gpu::Asking asking;                                      \
    static auto* const real = opacus_memprof::virtual_gpu::cudnn_function(&::name, #name); \
    return real == nullptr ? CUDNN_STATUS_NOT_INITIALIZED : real(__VA_ARGS__);             \
  }()
