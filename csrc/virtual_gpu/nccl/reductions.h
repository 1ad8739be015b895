// SPDX-License-Identifier: Apache-2.0
// What a reduction over ranks gives where every rank has the same data.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace opacus_memprof::virtual_gpu {

// Bytes of an element; 0 for a type that is not known.
std::size_t element_size(ncclDataType_t type);

// A sum of what was multiplied by a scalar first. One that lies on the device is read whenever the
// sum is used.
ncclRedOp_t create_scaled_sum(const void* scalar, ncclDataType_t type, bool on_device);
bool destroy_scaled_sum(ncclRedOp_t operation);

// Replaces each of the `count` values, which every one of `ranks` ranks has, by what they reduce
// to. Eight-bit floats stay as they are.
void reduce_alike(void* values, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                  int ranks);

// The same of ranks whose data differs, one after the other; and what follows after all of them.
void combine(void* into, const void* values, std::size_t count, ncclDataType_t type,
             ncclRedOp_t operation);
void finish(void* values, std::size_t count, ncclDataType_t type, ncclRedOp_t operation, int ranks);

}  // namespace opacus_memprof::virtual_gpu
