// SPDX-License-Identifier: Apache-2.0
// The number of a device in events, blocks and counters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace opacus_memprof {

using Device = std::uint8_t;  // 0 is the CPU, 1 + i is cuda:i
inline constexpr std::size_t kMaxDevices = 65;

inline std::string device_name(Device device) {
  return device == 0 ? "cpu" : "cuda:" + std::to_string(device - 1);
}

}  // namespace opacus_memprof
