// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "virtual_gpu/limits.h"

namespace virtual_gpu {
namespace {

void* pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

AddressSpace::AddressSpace(std::size_t size) {
  void* const mapped =
      mmap(nullptr, size + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped != MAP_FAILED) {
    madvise(mapped, size + kPage, MADV_DONTDUMP);  // a core file would have all of it
    const auto start = reinterpret_cast<std::uintptr_t>(mapped);
    gaps_[(start + kPage - 1) / kPage * kPage] = size;
  }
}

void* AddressSpace::take(std::size_t size) {
  const auto gap =
      std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& one) { return one.second >= size; });
  if (gap == gaps_.end() || mprotect(pointer(gap->first), size, PROT_READ | PROT_WRITE) != 0) {
    return nullptr;
  }
  const auto [start, length] = *gap;
  gaps_.erase(gap);
  if (length > size) {
    gaps_[start + size] = length - size;
  }
  return pointer(start);
}

void AddressSpace::give_back(void* address, std::size_t size) {
  madvise(address, size, MADV_DONTNEED);
  mprotect(address, size, PROT_NONE);
  auto gap = gaps_.emplace(reinterpret_cast<std::uintptr_t>(address), size).first;
  if (const auto next = std::next(gap); next != gaps_.end() && gap->first + size == next->first) {
    gap->second += next->second;
    gaps_.erase(next);
  }
  if (gap != gaps_.begin()) {
    const auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      gaps_.erase(gap);
    }
  }
}

}  // namespace virtual_gpu
