// SPDX-License-Identifier: Apache-2.0
// NCCL's communicators: of each, how many ranks it has and which one this process plays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "virtual_gpu/machine/streams.h"

namespace opacus_memprof::virtual_gpu {

// What NCCL takes of a device's memory for a communicator, outside of what torch asks for: the
// second one of two H200s with NVLink took this (NCCL 2.28.9; the first, with its kernels, 840
// MiB). More ranks and other links take other amounts.
inline constexpr std::size_t kCommunicatorMemory = std::size_t{486} << 20U;

struct Communicator {
  int ranks = 1;
  int rank = 0;
  int device = 0;
  std::uint64_t clique = 0;  // of whom all ranks are in this process; 0 for none
};

// Thread safe.
class Communicators {
 public:
  // 0 where the device has no memory left for it.
  Handle create(int ranks, int rank, int device, std::uint64_t clique = 0);
  // Nothing where it is not there, or no longer.
  [[nodiscard]] std::optional<Communicator> find(Handle communicator) const;
  // False where it is not there: a communicator may be aborted and then destroyed.
  bool destroy(Handle communicator);

  // How many ranks choose this color in a split. NCCL learns that from the other ranks, which are
  // not here; who makes the groups says it beforehand.
  void set_split_size(int color, int ranks);
  [[nodiscard]] std::optional<int> split_size(int color) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<Handle, Communicator> communicators_;
  std::unordered_map<int, int> split_sizes_;
};

// Never destroyed, like machine().
Communicators& communicators();

// The ranks of whatever the calling thread splits next, whatever its color; 0 where that is not
// known.
int& next_split_size();

}  // namespace opacus_memprof::virtual_gpu
