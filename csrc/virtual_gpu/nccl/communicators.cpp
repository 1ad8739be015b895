// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/nccl/communicators.h"

#include "virtual_gpu/machine/machine.h"

namespace opacus_memprof::virtual_gpu {

Communicators& communicators() {
  static auto* const only = new Communicators;
  return *only;
}

int& next_split_size() {
  thread_local int ranks = 0;
  return ranks;
}

Handle Communicators::create(int ranks, int rank, int device, std::uint64_t clique) {
  if (!machine().memory.take(device, kCommunicatorMemory)) {
    return 0;
  }
  const Handle handle = machine().streams.create_handle();
  const std::lock_guard lock(mutex_);
  communicators_[handle] = {ranks, rank, device, clique};
  return handle;
}

std::optional<Communicator> Communicators::find(Handle communicator) const {
  const std::lock_guard lock(mutex_);
  const auto found = communicators_.find(communicator);
  return found == communicators_.end() ? std::nullopt : std::optional(found->second);
}

bool Communicators::destroy(Handle communicator) {
  const auto found = find(communicator);
  const std::lock_guard lock(mutex_);
  if (communicators_.erase(communicator) == 0) {
    return false;
  }
  machine().memory.give_back(found->device, kCommunicatorMemory);
  return true;
}

void Communicators::set_split_size(int color, int ranks) {
  const std::lock_guard lock(mutex_);
  split_sizes_[color] = ranks;
}

std::optional<int> Communicators::split_size(int color) const {
  const std::lock_guard lock(mutex_);
  const auto found = split_sizes_.find(color);
  return found == split_sizes_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace opacus_memprof::virtual_gpu
