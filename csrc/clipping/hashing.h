// SPDX-License-Identifier: Apache-2.0
// Hashes of what a forward has done.
#pragma once

#include <cstdint>

namespace opacus_memprof::clipping {

inline std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 12) + (hash >> 4);
  return hash * 0xff51afd7ed558ccdULL;
}

}  // namespace opacus_memprof::clipping
