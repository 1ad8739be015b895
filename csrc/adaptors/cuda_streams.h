// SPDX-License-Identifier: Apache-2.0
// Streams as events name them.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace opacus_memprof {

inline cudaStream_t current_stream(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

// The id in Names; the default stream of every device is one.
std::uint8_t stream_id(cudaStream_t stream);

}  // namespace opacus_memprof
