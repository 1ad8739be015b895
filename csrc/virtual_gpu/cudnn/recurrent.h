// SPDX-License-Identifier: Apache-2.0
// How much memory cuDNN's LSTM, GRU and RNN take.
#pragma once

#include <cstdint>

#include "virtual_gpu/cudnn/descriptors.h"

namespace opacus_memprof::virtual_gpu {

std::int64_t gates(const RecurrentDescriptor& recurrent);

// How wide the input of a layer in one direction is.
std::int64_t input_of(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer);

// Numbers in the matrices of the layers in front of this one; of all if it is their number.
std::int64_t matrices_before(const RecurrentDescriptor& recurrent, std::int64_t pseudo_layer);

// Bytes that a call takes and gives back.
std::int64_t recurrent_workspace(const RecurrentDescriptor& recurrent,
                                 const SequenceDescriptor& sequence, bool training);

// Bytes that forward keeps for backward.
std::int64_t recurrent_reserve(const RecurrentDescriptor& recurrent,
                               const SequenceDescriptor& sequence);

}  // namespace opacus_memprof::virtual_gpu
