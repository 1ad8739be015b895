// SPDX-License-Identifier: Apache-2.0
#include "virtual_gpu/machine/address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "virtual_gpu/machine/common.h"
#include "virtual_gpu/machine/limits.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20U;
constexpr std::size_t kRegion = 32 * kMiB;

// The context's own region, and where its gaps are: the first one from the first kernel on.
constexpr std::size_t kContextRegion = 512 * kMiB;
constexpr std::size_t kFreedAtFirstKernel = 414 * kMiB;
constexpr std::size_t kFirstGap = 414 * kMiB;
constexpr std::size_t kFirstGapSize = 2 * kMiB;
constexpr std::size_t kSecondGap = 488 * kMiB;
constexpr std::size_t kSecondGapSize = 24 * kMiB;

// What the driver takes when the first kernel is launched: pieces, and most of a new region. With
// cuDNN before it, which has more pieces.
constexpr std::size_t kTakenAtFirstKernel[] = {2 * kMiB, 10 * kMiB};
constexpr std::size_t kTakenByCudnn[] = {2 * kMiB, 10 * kMiB, 2 * kMiB};
constexpr std::size_t kRegionOfKernels = 28 * kMiB;
constexpr std::size_t kTakenByCublas = 64 * kMiB;

void add_gap(std::map<std::uintptr_t, std::size_t>& gaps, std::uintptr_t start, std::size_t size) {
  auto gap = gaps.emplace(start, size).first;
  if (const auto next = std::next(gap); next != gaps.end() && gap->first + size == next->first) {
    gap->second += next->second;
    gaps.erase(next);
  }
  if (gap != gaps.begin()) {
    const auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      gaps.erase(gap);
    }
  }
}

}  // namespace

AddressSpace::AddressSpace(std::size_t size) {
  const std::size_t mapped_size = size + kContextRegion + kRegion;
  void* const mapped =
      mmap(nullptr, mapped_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return;
  }
  madvise(mapped, mapped_size, MADV_DONTDUMP);  // a core file would have all of it
  const auto start = reinterpret_cast<std::uintptr_t>(mapped);
  low_ = (start + kRegion - 1) / kRegion * kRegion;
  high_ = (start + mapped_size) / kRegion * kRegion;
  context_ = high_ - kContextRegion;
  regions_.push_back(
      {context_,
       kContextRegion,
       {{context_ + kFirstGap, kFirstGapSize}, {context_ + kSecondGap, kSecondGapSize}}});
}

std::uintptr_t AddressSpace::new_region_at(std::size_t size) const {
  std::vector<std::pair<std::uintptr_t, std::size_t>> taken;
  taken.reserve(regions_.size());
  for (const auto& region : regions_) {
    taken.emplace_back(region.start, region.size);
  }
  std::sort(taken.rbegin(), taken.rend());
  std::uintptr_t end = high_;
  for (const auto& [start, length] : taken) {
    if (end - (start + length) >= size) {
      break;
    }
    end = start;
  }
  return end - low_ >= size ? end - size : 0;
}

std::uintptr_t AddressSpace::find(std::size_t size) {
  for (auto region = regions_.rbegin(); region != regions_.rend(); ++region) {
    for (auto gap = region->gaps.begin(); gap != region->gaps.end(); ++gap) {
      if (const auto [start, length] = *gap; length >= size) {
        region->gaps.erase(gap);
        if (length > size) {
          region->gaps[start + size] = length - size;
        }
        return start;
      }
    }
  }
  const std::size_t whole = (size + kRegion - 1) / kRegion * kRegion;
  const std::uintptr_t start = new_region_at(whole);
  if (start != 0) {
    regions_.push_back({start, whole, {}});
    if (whole > size) {
      regions_.back().gaps[start + size] = whole - size;
    }
  }
  return start;
}

void* AddressSpace::take(std::size_t size) {
  const std::uintptr_t start = find(size);
  if (start == 0 || mprotect(pointer(start), size, PROT_READ | PROT_WRITE) != 0) {
    return nullptr;
  }
  return pointer(start);
}

void AddressSpace::give_back(void* address, std::size_t size) {
  madvise(address, size, MADV_DONTNEED);
  mprotect(address, size, PROT_NONE);
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  const auto region = std::find_if(regions_.begin(), regions_.end(), [&](const Region& one) {
    return one.start <= start && start < one.start + one.size;
  });
  add_gap(region->gaps, start, size);
  if (region->start != context_ && region->gaps.begin()->second == region->size) {
    regions_.erase(region);
  }
}

void AddressSpace::launch_kernel() {
  if (launched_ || regions_.empty()) {
    return;
  }
  launched_ = true;
  add_gap(regions_.front().gaps, context_, kFreedAtFirstKernel);
  if (!code_loaded_) {
    for (const std::size_t size : kTakenAtFirstKernel) {
      find(size);
    }
  }
  if (const std::uintptr_t start = new_region_at(kRegion); start != 0) {
    regions_.push_back({start, kRegion, {{start + kRegionOfKernels, kRegion - kRegionOfKernels}}});
  }
}

void AddressSpace::create_cudnn_handle() {
  if (launched_ || code_loaded_) {
    return;
  }
  code_loaded_ = true;
  for (const std::size_t size : kTakenByCudnn) {
    find(size);
  }
}

void AddressSpace::create_cublas_handle() {
  launch_kernel();
  find(kTakenByCublas);
}

}  // namespace opacus_memprof::virtual_gpu
