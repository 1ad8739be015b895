// SPDX-License-Identifier: Apache-2.0
#include "adaptors/cuda_streams.h"

#include <array>
#include <cinttypes>
#include <cstdio>

#include "core/names.h"

namespace opacus_memprof {

std::uint8_t stream_id(cudaStream_t stream) {
  if (stream == nullptr) return 0;
  std::array<char, 24> name{};
  std::snprintf(name.data(), name.size(), "0x%" PRIxPTR, reinterpret_cast<std::uintptr_t>(stream));
  return static_cast<std::uint8_t>(names().intern(Names::Kind::stream, name.data()));
}

std::uint8_t current_stream_id(c10::DeviceIndex device) {
  struct Last {
    c10::StreamId stream = 0;
    c10::DeviceIndex device = -1;
    std::uint8_t id = 0;
  };
  thread_local Last last;
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  if (stream.id() == 0) return 0;
  if (stream.id() != last.stream || device != last.device) {
    last = {.stream = stream.id(), .device = device, .id = stream_id(stream.stream())};
  }
  return last.id;
}

}  // namespace opacus_memprof
