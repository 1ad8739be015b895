// SPDX-License-Identifier: Apache-2.0
// Small conversions and checks that all parts of the virtual GPU share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace opacus_memprof::virtual_gpu {

// The driver's addresses (CUdeviceptr) are numbers, the runtime's are pointers.
inline void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

constexpr std::size_t round_up(std::size_t size, std::size_t unit) {
  return (size + unit - 1) / unit * unit;
}

// Returns whether this process can use a device of this number.
bool valid_device(int device);

}  // namespace opacus_memprof::virtual_gpu
