// SPDX-License-Identifier: Apache-2.0
// Memory that every allocation uses: one huge page, so that it needs one entry of the address
// translation cache. Between two allocations a training step runs enough code to evict other
// entries. In a virtual machine each page whose translation was evicted costs as much as all
// instructions of the profiler.
#pragma once

#include <cstddef>
#include <new>

namespace opacus_memprof {

// 64-byte aligned, zeroed, never freed. nullptr once the page is used up.
void* hot_memory(std::size_t bytes) noexcept;
bool is_hot_memory(const void* pointer) noexcept;

// An allocator for containers: hot memory while there is some, then the heap.
template <typename T>
struct HotAllocator {
  using value_type = T;
  HotAllocator() = default;
  template <typename U>
  explicit HotAllocator(const HotAllocator<U>& /*other*/) noexcept {}

  T* allocate(std::size_t count) {
    if (void* hot = hot_memory(count * sizeof(T)); hot != nullptr) return static_cast<T*>(hot);
    return static_cast<T*>(::operator new(count * sizeof(T)));
  }
  void deallocate(T* pointer, std::size_t /*count*/) noexcept {
    if (!is_hot_memory(pointer)) ::operator delete(pointer);
  }
  friend bool operator==(const HotAllocator&, const HotAllocator&) { return true; }
};

}  // namespace opacus_memprof
