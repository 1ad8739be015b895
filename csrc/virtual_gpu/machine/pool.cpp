// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/pool.h"

#include <algorithm>

#include "virtual_gpu/machine/common.h"

namespace opacus_memprof::virtual_gpu {

void* Pool::allocate(std::size_t size) {
  const std::lock_guard lock(mutex_);
  const std::size_t rounded = round_up(std::max<std::size_t>(size, 1), kUnit);
  if (rounded < size) {
    return nullptr;
  }
  auto room = find_room(rounded);
  if (room == free_.end()) {
    const std::size_t chunk = round_up(rounded, kChunk);
    void* const start = chunk < rounded ? nullptr : memory_.allocate(device_, chunk);
    if (start == nullptr) {
      return nullptr;
    }
    const auto address = reinterpret_cast<Address>(start);
    chunks_[address] = chunk;
    reserved_.current += chunk;
    reserved_.high = std::max(reserved_.high, reserved_.current);
    room = free_.emplace(address, chunk).first;
  }
  const Address address = room->first;
  const std::size_t left = room->second - rounded;
  free_.erase(room);
  if (left > 0) {
    free_.emplace(address + rounded, left);
  }
  blocks_[address] = rounded;
  used_.current += rounded;
  used_.high = std::max(used_.high, used_.current);
  return pointer(address);
}

// The smallest range that is large enough.
Pool::Free::iterator Pool::find_room(std::size_t size) {
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second >= size && (best == free_.end() || at->second < best->second)) {
      best = at;
    }
  }
  return best;
}

bool Pool::release(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<Address>(address));
  if (found == blocks_.end()) {
    return false;
  }
  used_.current -= found->second;
  auto range = free_.emplace(found->first, found->second).first;
  blocks_.erase(found);
  // It grows together with its free neighbours in the same chunk.
  if (const auto next = std::next(range); next != free_.end() && !chunks_.contains(next->first) &&
                                          range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range != free_.begin() && !chunks_.contains(range->first)) {
    if (const auto before = std::prev(range); before->first + before->second == range->first) {
      before->second += range->second;
      free_.erase(range);
    }
  }
  return true;
}

void Pool::trim(std::size_t keep) {
  const std::lock_guard lock(mutex_);
  for (auto chunk = chunks_.begin(); chunk != chunks_.end() && reserved_.current > keep;) {
    const auto range = free_.find(chunk->first);
    if (range == free_.end() || range->second != chunk->second) {
      ++chunk;
      continue;
    }
    memory_.release(pointer(chunk->first));
    reserved_.current -= chunk->second;
    free_.erase(range);
    chunk = chunks_.erase(chunk);
  }
}

Pool::Figures Pool::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

Pool::Figures Pool::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

void Pool::reset_used_high() {
  const std::lock_guard lock(mutex_);
  used_.high = used_.current;
}

void Pool::reset_reserved_high() {
  const std::lock_guard lock(mutex_);
  reserved_.high = reserved_.current;
}

}  // namespace opacus_memprof::virtual_gpu
