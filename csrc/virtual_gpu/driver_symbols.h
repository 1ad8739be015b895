// SPDX-License-Identifier: Apache-2.0
// A function of the driver by name, as cuGetProcAddress finds it.
#pragma once

namespace virtual_gpu {

// The newest version of it that is here (cuMemGetInfo is cuMemGetInfo_v2); nullptr, and a sentence,
// where none is.
void* driver_symbol(const char* name);

}  // namespace virtual_gpu
