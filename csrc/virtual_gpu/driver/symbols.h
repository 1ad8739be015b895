// SPDX-License-Identifier: Apache-2.0
// A function of the driver by name, as cuGetProcAddress finds it.
#pragma once

namespace opacus_memprof::virtual_gpu {

// In the version of the CUDA that torch was built for (cuMemGetInfo is cuMemGetInfo_v2); nullptr,
// and a sentence, where there is none.
void* driver_symbol(const char* name);

}  // namespace opacus_memprof::virtual_gpu
