// SPDX-License-Identifier: Apache-2.0
#include "allocators/cuda_streams.h"

#include <array>
#include <cinttypes>
#include <cstdio>

#include "core/names.h"

namespace opacus_memprof {

std::uint8_t stream_id(cudaStream_t stream) {
  if (stream == nullptr) return 0;
  thread_local cudaStream_t last = nullptr;
  thread_local std::uint8_t last_id = 0;
  if (stream != last) {
    std::array<char, 24> name{};
    std::snprintf(name.data(), name.size(), "0x%" PRIxPTR,
                  reinterpret_cast<std::uintptr_t>(stream));
    last_id = static_cast<std::uint8_t>(names().intern(Names::Kind::stream, name.data()));
    last = stream;
  }
  return last_id;
}

}  // namespace opacus_memprof
