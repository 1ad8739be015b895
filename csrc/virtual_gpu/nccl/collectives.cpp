// SPDX-License-Identifier: Apache-2.0
// NCCL's collectives and messages. Nothing is sent: a result of at most kSmall bytes is what it
// would be if every rank had this rank's data, and a larger one is only booked.
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/machine.h"
#include "virtual_gpu/nccl/communicators.h"
#include "virtual_gpu/nccl/reductions.h"
#include "virtual_gpu/nccl/together.h"

namespace virtual_gpu = opacus_memprof::virtual_gpu;

namespace {

using virtual_gpu::Collective;
using virtual_gpu::Communicator;
using virtual_gpu::element_size;
using virtual_gpu::kSmall;
using virtual_gpu::together;

void move(void* to, const void* from, std::size_t size) {
  if (to != from && size > 0) {
    std::memmove(to, from, size);
  }
}

char* offset(void* address, std::size_t size) { return static_cast<char*>(address) + size; }
const char* offset(const void* address, std::size_t size) {
  return static_cast<const char*>(address) + size;
}

// One kernel in the stream, and what it writes where that is small.
template <class Write>
ncclResult_t collective(ncclComm_t communicator, cudaStream_t stream, Write write) {
  const auto found =
      virtual_gpu::communicators().find(reinterpret_cast<virtual_gpu::Handle>(communicator));
  if (!found) {
    return ncclInvalidArgument;
  }
  virtual_gpu::machine().streams.launch(reinterpret_cast<virtual_gpu::Handle>(stream));
  write(*found);
  return ncclSuccess;
}

bool is_small(std::size_t count, ncclDataType_t type, int ranks = 1) {
  return count <= kSmall && count * element_size(type) * static_cast<std::size_t>(ranks) <= kSmall;
}

// The size of a message; kSmall + 1 for every message that is not small, since the product could
// overflow.
std::size_t bytes(std::size_t count, ncclDataType_t type) {
  return is_small(count, type) ? count * element_size(type) : kSmall + 1;
}

std::size_t ranks_of(const Communicator& communicator) {
  return static_cast<std::size_t>(communicator.ranks);
}
std::size_t rank_of(const Communicator& communicator) {
  return static_cast<std::size_t>(communicator.rank);
}

// The same `part` from every rank, one after the other.
void repeat(void* to, const void* part, std::size_t size, std::size_t times) {
  for (std::size_t index = 0; index < times; ++index) {
    move(offset(to, index * size), part, size);
  }
}

// --- messages: sent in a group, where both ends are known ---

struct Message {
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t size = 0;
  int peer = 0;
  int rank = 0;
};

struct Group {
  int depth = 0;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

Group& group() {
  thread_local Group only;
  return only;
}

// What a peer sends here is what this rank would send to one with its own number; and where it
// sends nothing to itself, as around a ring, what it sends in the same place.
void deliver(Group& group) {
  auto& sends = group.sends;
  for (const Message& receive : group.receives) {
    const auto fits = [&](const Message& send) { return send.size == receive.size; };
    auto found = std::find_if(sends.begin(), sends.end(), [&](const Message& send) {
      return fits(send) && send.peer == receive.rank;
    });
    if (found == sends.end()) {
      found = std::find_if(sends.begin(), sends.end(), fits);
      if (found == sends.end()) {
        continue;
      }
      move(receive.to, found->from, receive.size);
      sends.erase(found);
    } else {
      move(receive.to, found->from, receive.size);
    }
  }
  group.sends.clear();
  group.receives.clear();
}

void post(const Message& message) {
  if (message.size > kSmall) {
    return;
  }
  (message.to == nullptr ? group().sends : group().receives).push_back(message);
  if (group().depth ==
      0) {  // alone: what a receive gets is not known, and its buffer stays as it is
    group().sends.clear();
    group().receives.clear();
  }
}

}  // namespace

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group().depth == 0) {
    return ncclInvalidUsage;
  }
  if (--group().depth == 0) {
    deliver(group());
  }
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (together(all, {Collective::all_reduce, from, to, count, type, operation})) return;
    if (is_small(count, type)) {
      move(to, from, count * element_size(type));
      virtual_gpu::reduce_alike(to, count, type, operation, all.ranks);
    }
  });
}

ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t communicator,
                        cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (together(all, {Collective::reduce, from, to, count, type, operation, root})) return;
    if (all.rank == root && is_small(count, type)) {
      move(to, from, count * element_size(type));
      virtual_gpu::reduce_alike(to, count, type, operation, all.ranks);
    }
  });
}

// Where another rank is the root, `to` stays as this rank has it; but in a group in which every
// rank is the root once, as in a gather of different sizes, it gets what this rank broadcasts.
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (together(all, {Collective::broadcast, from, to, count, type, ncclSum, root})) return;
    const std::size_t size = bytes(count, type);
    if (all.rank != root) {
      post({nullptr, to, size, root, all.rank});
      return;
    }
    post({from, nullptr, size, all.rank, all.rank});
    if (size <= kSmall) {
      move(to, from, size);
    }
  });
}

ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t communicator, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t communicator,
                               cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (together(all, {Collective::reduce_scatter, from, to, count, type, operation})) return;
    if (is_small(count, type)) {
      const std::size_t size = count * element_size(type);
      move(to, offset(from, rank_of(all) * size), size);
      virtual_gpu::reduce_alike(to, count, type, operation, all.ranks);
    }
  });
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (together(all, {Collective::all_gather, from, to, count, type})) return;
    if (is_small(count, type, all.ranks)) {
      repeat(to, from, count * element_size(type), ranks_of(all));
    }
  });
}

ncclResult_t ncclAlltoAll(const void* from, void* to, std::size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (is_small(count, type, all.ranks)) {  // every rank sends the part for this rank
      const std::size_t size = count * element_size(type);
      const std::vector<char> part(offset(from, rank_of(all) * size),
                                   offset(from, (rank_of(all) + 1) * size));
      repeat(to, part.data(), size, ranks_of(all));
    }
  });
}

ncclResult_t ncclGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        int root, ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (all.rank == root && is_small(count, type, all.ranks)) {
      repeat(to, from, count * element_size(type), ranks_of(all));
    }
  });
}

ncclResult_t ncclScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                         int root, ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    if (all.rank == root && is_small(count, type)) {
      const std::size_t size = count * element_size(type);
      move(to, offset(from, rank_of(all) * size), size);
    }
  });
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    post({from, nullptr, bytes(count, type), peer, all.rank});
  });
}

ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return collective(communicator, stream, [&](const Communicator& all) {
    post({nullptr, to, bytes(count, type), peer, all.rank});
  });
}
}
