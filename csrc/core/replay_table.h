// SPDX-License-Identifier: Apache-2.0
// The live blocks of a replay, by device and address.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// The blocks lie one after the other as they are born, later ones in the places of the dead; an
// index of 8 bytes a slot finds them by key. Not thread safe; a pointer holds until its block is
// erased.
//
// The index has open addressing with linear probing; an erased slot is closed by moving later ones
// back, so that millions of births and deaths leave no tombstones.
class ReplayTable {
 public:
  ReplayTable() : slots_(std::size_t{1} << kFirstBits) {}

  [[nodiscard]] static std::uint64_t key(const Event& event) {
    return std::uint64_t{event.device} << 48 | event.address;
  }

  // Where the index would have the key: worth a prefetch some events before it is needed, since of
  // a table with millions of blocks hardly any of it is in a cache.
  [[nodiscard]] const void* home(std::uint64_t key) const { return &slots_[home_of(tag_of(key))]; }

  // As new, but for its memory, which it keeps.
  void clear() {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    used_ = 0;
    unused_.clear();
  }

  [[nodiscard]] ReplayBlock* find(std::uint64_t key) {
    const std::uint32_t tag = tag_of(key);
    for (std::size_t i = home_of(tag); slots_[i].place != 0; i = next(i)) {
      if (slots_[i].tag != tag) continue;
      if (ReplayBlock& block = at(slots_[i].place); block.key == key) return &block;
    }
    return nullptr;
  }

  // The key must not be there yet.
  ReplayBlock* insert(const ReplayBlock& block) {
    if ((used_ - unused_.size() + 1) * 4 > slots_.size() * 3) grow();
    const std::uint32_t place = take_place();
    put({.tag = tag_of(block.key), .place = place});
    return &(at(place) = block);
  }

  void erase(ReplayBlock* block) {
    std::size_t hole = home_of(tag_of(block->key));
    while (&at(slots_[hole].place) != block) hole = next(hole);
    unused_.push_back(slots_[hole].place);
    block->key = kEmpty;
    for (std::size_t i = next(hole); slots_[i].place != 0; i = next(i)) {
      // A slot may move into the hole unless its home lies between the hole and itself.
      const std::size_t home = home_of(slots_[i].tag);
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = {};
  }

  // In the order of birth, but for places taken again.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t place = 1; place <= used_; ++place) {
      if (const ReplayBlock& block = at(place); block.key != kEmpty) visit(block);
    }
  }

 private:
  struct Slot {
    std::uint32_t tag = 0;
    std::uint32_t place = 0;  // of the block, from 1 (the last: 128 GiB of blocks); 0: empty
  };

  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  static constexpr int kFirstBits = 12;
  static constexpr std::size_t kChunk = 4096;  // blocks; chunks are never moved

  [[nodiscard]] std::size_t mask() const { return slots_.size() - 1; }
  [[nodiscard]] std::size_t next(std::size_t slot) const { return (slot + 1) & mask(); }

  // Addresses are multiples of 64 or 512: the product's high bits depend on every bit of the key.
  [[nodiscard]] static std::uint32_t tag_of(std::uint64_t key) {
    return static_cast<std::uint32_t>(key * 0x9E3779B97F4A7C15u >> 32);
  }
  [[nodiscard]] std::size_t home_of(std::uint32_t tag) const { return tag >> (32 - bits_); }

  [[nodiscard]] ReplayBlock& at(std::size_t place) const {
    return chunks_[(place - 1) / kChunk][(place - 1) % kChunk];
  }

  std::uint32_t take_place() {
    if (!unused_.empty()) {
      const std::uint32_t place = unused_.back();
      unused_.pop_back();
      return place;
    }
    if (used_ == chunks_.size() * kChunk) {
      chunks_.push_back(std::make_unique<ReplayBlock[]>(kChunk));
    }
    return static_cast<std::uint32_t>(++used_);
  }

  void put(Slot slot) {
    std::size_t i = home_of(slot.tag);
    while (slots_[i].place != 0) i = next(i);
    slots_[i] = slot;
  }

  void grow() {
    const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(slots_.size() * 2));
    ++bits_;
    for (const Slot& slot : before) {
      if (slot.place != 0) put(slot);
    }
  }

  int bits_ = kFirstBits;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<ReplayBlock[]>> chunks_;
  std::size_t used_ = 0;               // places that hold or held a block
  std::vector<std::uint32_t> unused_;  // those of them that hold none now
};

}  // namespace opacus_memprof
