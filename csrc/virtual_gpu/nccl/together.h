// SPDX-License-Identifier: Apache-2.0
// Collectives of communicators whose ranks are all in this process, as those of torch.cuda.comm:
// they have all ranks' data, and are executed when the last rank has called.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>

#include "virtual_gpu/nccl/communicators.h"

namespace opacus_memprof::virtual_gpu {

enum class Collective : std::uint8_t { all_reduce, reduce, broadcast, reduce_scatter, all_gather };

// What one rank calls with; `count` elements of what it gives, or gets in a reduce-scatter.
struct Part {
  Collective collective;
  const void* from;
  void* to;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t operation = ncclSum;
  int root = 0;
};

// False where other ranks are elsewhere.
bool together(const Communicator& communicator, const Part& part);

}  // namespace opacus_memprof::virtual_gpu
