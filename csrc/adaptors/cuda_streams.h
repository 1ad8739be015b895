// SPDX-License-Identifier: Apache-2.0
// Streams as events name them: by their ids in Names. The default stream of every device is 0.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace opacus_memprof {

std::uint8_t stream_id(cudaStream_t stream);

// Of the stream that is current on the device. Asks torch for its number of the stream, for the
// stream itself it would change devices to and fro.
std::uint8_t current_stream_id(c10::DeviceIndex device);

}  // namespace opacus_memprof
