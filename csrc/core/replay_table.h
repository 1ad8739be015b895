// SPDX-License-Identifier: Apache-2.0
// The live blocks of a replay, by device and address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/event.h"

namespace opacus_memprof {

struct ReplayBlock {
  std::uint64_t key =
      ~std::uint64_t{0};  // device above 48 bits of address; all ones: an empty slot

  std::uint64_t birth : 45 = 0;  // how many blocks were born before this one
  std::uint64_t retagged : 1 = 0;
  std::uint64_t captured : 1 = 0;  // has been an activation hook's
  std::uint64_t seeded : 1 = 0;    // was there before the file
  std::uint64_t stream : 8 = 0;
  std::uint64_t thread : 8 = 0;

  std::uint64_t size : 48 = 0;
  std::uint64_t category : 8 = 0;
  std::uint64_t phase : 8 = 0;  // at birth, as op and step

  std::uint32_t step = 0;
  std::uint16_t module = 0;
  std::uint16_t op = 0;

  [[nodiscard]] std::uint8_t device() const { return static_cast<std::uint8_t>(key >> 48); }
};
static_assert(sizeof(ReplayBlock) == 32);

// Open addressing with linear probing; an erased slot is closed by moving later ones back, so that
// millions of births and deaths leave no tombstones. Not thread safe; pointers hold until the next
// insert or erase.
class ReplayTable {
 public:
  ReplayTable() : slots_(std::size_t{1} << kFirstBits) {}

  [[nodiscard]] static std::uint64_t key(const Event& event) {
    return std::uint64_t{event.device} << 48 | event.address;
  }

  // Asks for the memory where the key would be, some events before it is needed: of a table with
  // millions of blocks hardly any of it is in a cache.
  void prefetch(std::uint64_t key) const { __builtin_prefetch(&slots_[home_of(key)], 1); }

  // As new, but for its memory, which it keeps.
  void clear() {
    size_ = 0;
    for (ReplayBlock& slot : slots_) slot.key = kEmpty;
  }

  [[nodiscard]] ReplayBlock* find(std::uint64_t key) {
    ReplayBlock& slot = slots_[slot_of(key)];
    return slot.key == key ? &slot : nullptr;
  }

  // The key must not be there yet.
  ReplayBlock* insert(const ReplayBlock& block) {
    if ((size_ + 1) * 4 > slots_.size() * 3) grow();
    ++size_;
    ReplayBlock& slot = slots_[slot_of(block.key)];
    slot = block;
    return &slot;
  }

  void erase(ReplayBlock* block) {
    --size_;
    auto hole = static_cast<std::size_t>(block - slots_.data());
    for (std::size_t i = next(hole); slots_[i].key != kEmpty; i = next(i)) {
      // A block may move into the hole unless its home lies between the hole and itself.
      const std::size_t home = home_of(slots_[i].key);
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole].key = kEmpty;
  }

  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const ReplayBlock& slot : slots_) {
      if (slot.key != kEmpty) visit(slot);
    }
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  static constexpr int kFirstBits = 12;

  [[nodiscard]] std::size_t mask() const { return slots_.size() - 1; }
  [[nodiscard]] std::size_t next(std::size_t slot) const { return (slot + 1) & mask(); }

  // Addresses are multiples of 64 or 512: the product's high bits depend on every bit of the key.
  [[nodiscard]] std::size_t home_of(std::uint64_t key) const {
    return static_cast<std::size_t>(key * 0x9E3779B97F4A7C15u >> (64 - bits_));
  }

  // Where the key is, or the empty slot where it would go.
  [[nodiscard]] std::size_t slot_of(std::uint64_t key) const {
    std::size_t slot = home_of(key);
    while (slots_[slot].key != key && slots_[slot].key != kEmpty) slot = next(slot);
    return slot;
  }

  void grow() {
    const std::vector<ReplayBlock> before =
        std::exchange(slots_, std::vector<ReplayBlock>(slots_.size() * 2));
    ++bits_;
    for (const ReplayBlock& block : before) {
      if (block.key != kEmpty) slots_[slot_of(block.key)] = block;
    }
  }

  int bits_ = kFirstBits;
  std::size_t size_ = 0;
  std::vector<ReplayBlock> slots_;
};

}  // namespace opacus_memprof
