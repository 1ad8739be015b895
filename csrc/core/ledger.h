// SPDX-License-Identifier: Apache-2.0
// The live blocks, by address. Not thread safe: the recorder's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/hot_memory.h"

namespace opacus_memprof {

// Half a cache line: the table is the largest thing that an allocation touches.
class Block {
 public:
  std::uint64_t address = 0;  // 0 marks an empty slot

  // Bytes requested; what it counts as now; what it counts as once no capture holds it. One word,
  // as the event file has it: writing its parts and reading it whole would stall.
  [[nodiscard]] std::uint64_t size() const noexcept { return word_ & kSize; }
  [[nodiscard]] std::uint8_t category() const noexcept {
    return static_cast<std::uint8_t>(word_ >> 48U);
  }
  [[nodiscard]] std::uint8_t base() const noexcept {
    return static_cast<std::uint8_t>(word_ >> 56U);
  }
  void set(std::uint64_t size, std::uint8_t category, std::uint8_t base) noexcept {
    word_ = (size & kSize) | std::uint64_t{category} << 48U | std::uint64_t{base} << 56U;
  }

 private:
  static constexpr std::uint64_t kSize = (std::uint64_t{1} << 48U) - 1;
  std::uint64_t word_ = 0;

 public:
  std::uint32_t step = 0;    // physical step of birth
  std::uint32_t serial = 0;  // tells a block from a later one at its address
  std::uint16_t module = 0;
  std::uint16_t op = 0;
  std::uint8_t device = 0;
  std::uint8_t stream = 0;
  std::uint8_t thread = 0;
  std::uint8_t phase : 6 = 0;     // of birth
  std::uint8_t captured : 1 = 0;  // Opacus holds it; the recorder counts how often
  std::uint8_t seeded : 1 = 0;    // there before the profiler; its free may go unseen
};
static_assert(sizeof(Block) == 32);

// Open addressing with linear probing and backward-shift deletion: about one cache line an access,
// no allocation until the table grows.
class Ledger {
 public:
  Ledger();

  // nullptr where there is none. Pointers are valid until the next insert or erase.
  [[nodiscard]] Block* find(std::uint64_t address) noexcept;
  // The block at this address (not 0), which is new and empty but for its address where there was
  // none: one search for both. May throw std::bad_alloc when the table must grow.
  std::pair<Block*, bool> try_emplace(std::uint64_t address);
  void erase(Block* block) noexcept;

  // Where the block at this address is, or next to it, for who wants to prefetch it.
  [[nodiscard]] const void* place(std::uint64_t address) const noexcept {
    return &slots_[home(address)];
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  template <typename Function>
  void for_each(Function function) {
    for (Block& block : slots_) {
      if (block.address != 0) function(block);
    }
  }

 private:
  [[nodiscard]] std::size_t home(std::uint64_t address) const noexcept {
    // Fibonacci hashing; allocators align to 64 bytes or more.
    return static_cast<std::size_t>((address >> 6U) * 0x9E3779B97F4A7C15ULL >> shift_);
  }
  [[nodiscard]] std::size_t next(std::size_t slot) const noexcept {
    return (slot + 1) & (slots_.size() - 1);
  }
  [[gnu::noinline]] void grow();

  std::vector<Block, HotAllocator<Block>> slots_;
  unsigned shift_;
  std::size_t size_ = 0;
};

inline Block* Ledger::find(std::uint64_t address) noexcept {
  if (address == 0) return nullptr;
  for (std::size_t slot = home(address);; slot = next(slot)) {
    if (slots_[slot].address == address) return &slots_[slot];
    if (slots_[slot].address == 0) return nullptr;
  }
}

inline std::pair<Block*, bool> Ledger::try_emplace(std::uint64_t address) {
  if (2 * (size_ + 1) > slots_.size()) grow();
  std::size_t slot = home(address);
  for (; slots_[slot].address != 0; slot = next(slot)) {
    if (slots_[slot].address == address) return {&slots_[slot], false};
  }
  ++size_;
  slots_[slot] = {};
  slots_[slot].address = address;
  return {&slots_[slot], true};
}

inline void Ledger::erase(Block* block) noexcept {
  // Close the gap: move back every later block of the run whose home is not after the gap.
  auto gap = static_cast<std::size_t>(block - slots_.data());
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = next(gap); slots_[slot].address != 0; slot = next(slot)) {
    const std::size_t from_home = (slot - home(slots_[slot].address)) & mask;
    const std::size_t from_gap = (slot - gap) & mask;
    if (from_home >= from_gap) {
      slots_[gap] = slots_[slot];
      gap = slot;
    }
  }
  slots_[gap].address = 0;
  --size_;
}

}  // namespace opacus_memprof
