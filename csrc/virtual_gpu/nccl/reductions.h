// SPDX-License-Identifier: Apache-2.0
// What a reduction over ranks gives where every rank has the same data.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace opacus_memprof::virtual_gpu {

// Bytes of an element; 0 for a type that is not known.
std::size_t element_size(ncclDataType_t type);

// Creates the operation that multiplies by a scalar and then sums. A scalar on the device is read
// at each use.
ncclRedOp_t create_scaled_sum(const void* scalar, ncclDataType_t type, bool on_device);
bool destroy_scaled_sum(ncclRedOp_t operation);

// Replaces each of the `count` values by its reduction over `ranks` ranks that all have this value.
// Eight-bit floats stay as they are.
void reduce_alike(void* values, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                  int ranks);

// For ranks with different data: `combine` adds one rank's values to the result, and `finish`,
// called after all ranks, applies the factor of an average or a scaled sum.
void combine(void* into, const void* values, std::size_t count, ncclDataType_t type,
             ncclRedOp_t operation);
void finish(void* values, std::size_t count, ncclDataType_t type, ncclRedOp_t operation, int ranks);

}  // namespace opacus_memprof::virtual_gpu
