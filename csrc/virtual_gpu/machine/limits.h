// SPDX-License-Identifier: Apache-2.0
// What is the same on every GPU of the table, from the CUDA C++ Programming Guide, "Compute
// Capabilities".
#pragma once

#include <cstddef>

namespace opacus_memprof::virtual_gpu {

inline constexpr int kThreadsPerBlock = 1024;
inline constexpr int kBlockDepth = 64;
inline constexpr int kGridWidth = 2147483647;
inline constexpr int kGridHeight = 65535;
inline constexpr int kSharedMemoryPerBlock = 49152;
inline constexpr int kReservedSharedMemory = 1024;
inline constexpr int kConstantMemory = 65536;
inline constexpr int kWarpSize = 32;
inline constexpr int kRegisters = 65536;  // per block, and per multiprocessor
inline constexpr int kTextureAlignment = 512;
inline constexpr int kCopyEngines = 3;

// The driver gives out device memory in pages of this size.
inline constexpr std::size_t kPage = std::size_t{2} << 20U;

// Copies and fills up to this size are executed; larger ones only count. Operations are executed up
// to the same size (csrc/virtual_values).
inline constexpr std::size_t kSmall = std::size_t{1} << 20U;

}  // namespace opacus_memprof::virtual_gpu
