// SPDX-License-Identifier: Apache-2.0
#include "core/hot_memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <memory>

namespace opacus_memprof {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20U;

// A huge page, or ordinary pages of the same size if the kernel has none; nullptr without memory.
char* hot_page() noexcept {
  static char* const page = []() -> char* {
    void* memory = ::mmap(nullptr, 2 * kHugePage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    std::size_t room = 2 * kHugePage;
    void* aligned = std::align(kHugePage, kHugePage, memory, room);
    ::madvise(aligned, kHugePage, MADV_HUGEPAGE);
    return static_cast<char*>(aligned);
  }();
  return page;
}

std::atomic<std::size_t> used{0};

}  // namespace

void* hot_memory(std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  const std::size_t rounded = (bytes + kLine - 1) / kLine * kLine;
  char* page = hot_page();
  if (page == nullptr || rounded > kHugePage) return nullptr;
  std::size_t begin = used.load();
  do {
    if (begin + rounded > kHugePage) return nullptr;
  } while (!used.compare_exchange_weak(begin, begin + rounded));
  return page + begin;
}

bool is_hot_memory(const void* pointer) noexcept {
  const char* page = hot_page();
  const auto* address = static_cast<const char*>(pointer);
  return page != nullptr && address >= page && address < page + kHugePage;
}

}  // namespace opacus_memprof
