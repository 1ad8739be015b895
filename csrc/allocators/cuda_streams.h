// SPDX-License-Identifier: Apache-2.0
// The names of streams in events.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace opacus_memprof {

// Returns the id in Names; the default streams of all devices have id 0.
std::uint8_t stream_id(cudaStream_t stream);

inline std::uint8_t current_stream_id(c10::DeviceIndex device) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  if (stream.id() == 0) return 0;  // torch's number of the default stream
  return stream_id(stream.stream());
}

}  // namespace opacus_memprof
