// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/memory.h"

#include <sys/mman.h>

#include <algorithm>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::size_t kHostPage = 4096;

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// Address space aligned to `unit`, of which nothing exists until it is touched; nullptr where the
// kernel has none left.
void* map_lazily(std::size_t size, std::size_t unit, int protection) {
  void* const mapped =
      mmap(nullptr, size + unit, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  const std::uintptr_t start = round_up(number(mapped), unit);
  if (const std::size_t before = start - number(mapped); before > 0) {
    munmap(mapped, before);
  }
  if (const std::size_t after = number(mapped) + unit - start; after > 0) {
    munmap(pointer(start + size), after);
  }
  return pointer(start);
}

}  // namespace

void Memory::add_device(std::size_t total, std::size_t context) {
  const std::lock_guard lock(mutex_);
  // More addresses than memory, which gaps between what is allocated must not use up.
  constexpr std::size_t kSpare = 4;
  devices_.push_back(
      {total, std::min(context, total), AddressSpace(kSpare * round_up(total, kPage))});
}

int Memory::devices() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(devices_.size());
}

bool Memory::take_locked(int device, std::size_t size) {
  Device& from = devices_[static_cast<std::size_t>(device)];
  if (size > from.total - from.used) {
    return false;
  }
  from.used += size;
  return true;
}

void* Memory::allocate(int device, std::size_t size, Kind kind) {
  const std::lock_guard lock(mutex_);
  const std::size_t rounded = round_up(std::max<std::size_t>(size, 1), kPage);
  if (rounded < size || !take_locked(device, rounded)) {
    return nullptr;
  }
  Device& of = devices_[static_cast<std::size_t>(device)];
  void* const address = of.addresses.take(rounded);
  if (address == nullptr) {
    of.used -= rounded;
    return nullptr;
  }
  ranges_[number(address)] = {number(address), rounded, kind, device, true};
  return address;
}

void Memory::launch_kernel(int device) {
  const std::lock_guard lock(mutex_);
  devices_[static_cast<std::size_t>(device)].addresses.launch_kernel();
}

void Memory::create_cublas_handle(int device) {
  const std::lock_guard lock(mutex_);
  devices_[static_cast<std::size_t>(device)].addresses.create_cublas_handle();
}

void Memory::create_cudnn_handle(int device) {
  const std::lock_guard lock(mutex_);
  devices_[static_cast<std::size_t>(device)].addresses.create_cudnn_handle();
}

void* Memory::allocate_pinned(std::size_t size) {
  const std::lock_guard lock(mutex_);
  const std::size_t rounded = round_up(std::max<std::size_t>(size, 1), kHostPage);
  void* const address = map_lazily(rounded, kHostPage, PROT_READ | PROT_WRITE);
  if (address != nullptr) {
    ranges_[number(address)] = {number(address), rounded, Kind::pinned, 0, true};
  }
  return address;
}

bool Memory::pin(void* address, std::size_t size) {
  const std::lock_guard lock(mutex_);
  return ranges_.try_emplace(number(address), Range{number(address), size, Kind::pinned, 0, false})
      .second;
}

bool Memory::release(void* address) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(number(address));
  if (found == ranges_.end()) {
    return false;
  }
  const Range& range = found->second;
  if (range.kind != Kind::pinned) {
    Device& of = devices_[static_cast<std::size_t>(range.device)];
    of.addresses.give_back(address, range.size);
    of.used -= range.size;
  } else if (range.ours) {
    munmap(address, range.size);
  }
  ranges_.erase(found);
  return true;
}

std::optional<Range> Memory::find(const void* address) const {
  const std::lock_guard lock(mutex_);
  auto after = ranges_.upper_bound(number(address));
  if (after == ranges_.begin()) {
    return std::nullopt;
  }
  const Range& range = std::prev(after)->second;
  return number(address) - range.start < range.size ? std::optional(range) : std::nullopt;
}

std::size_t Memory::total(int device) const {
  const std::lock_guard lock(mutex_);
  return devices_[static_cast<std::size_t>(device)].total;
}

std::size_t Memory::free(int device) const {
  const std::lock_guard lock(mutex_);
  const Device& of = devices_[static_cast<std::size_t>(device)];
  return of.total - of.used;
}

bool Memory::take(int device, std::size_t size) {
  const std::lock_guard lock(mutex_);
  return take_locked(device, size);
}

void Memory::give_back(int device, std::size_t size) {
  const std::lock_guard lock(mutex_);
  Device& to = devices_[static_cast<std::size_t>(device)];
  to.used -= std::min(size, to.used);
}

void* Memory::reserve_addresses(std::size_t size) {
  const std::lock_guard lock(mutex_);
  void* const address = map_lazily(size, kPage, PROT_NONE);
  if (address != nullptr) {
    reservations_[number(address)] = size;
  }
  return address;
}

bool Memory::release_addresses(void* address, std::size_t size) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(number(address));
  if (found == reservations_.end() || found->second != size) {
    return false;
  }
  munmap(address, size);
  reservations_.erase(found);
  return true;
}

bool Memory::map(void* address, std::size_t size, int device) {
  const std::lock_guard lock(mutex_);
  if (mprotect(address, size, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  ranges_[number(address)] = {number(address), size, Kind::device, device, true};
  return true;
}

bool Memory::unmap(void* address, std::size_t size) {
  const std::lock_guard lock(mutex_);
  // Ranges that were mapped one by one may be unmapped together.
  const std::uintptr_t end = number(address) + size;
  for (auto at = ranges_.lower_bound(number(address)); at != ranges_.end() && at->first < end;) {
    at = ranges_.erase(at);
  }
  // Its pages go, so that what is mapped there next reads as zero.
  return madvise(address, size, MADV_DONTNEED) == 0 && mprotect(address, size, PROT_NONE) == 0;
}

}  // namespace opacus_memprof::virtual_gpu
