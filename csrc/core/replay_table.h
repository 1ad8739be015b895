// SPDX-License-Identifier: Apache-2.0
// The live blocks of a replay, by device and address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/event.h"
#include "core/hash_table.h"

namespace opacus_memprof {

struct ReplayBlock {
  std::uint64_t key =
      ~std::uint64_t{0};  // device above 48 bits of address; all ones: an empty slot

  std::uint64_t birth : 37 = 0;  // how many blocks were born before this one
  std::uint64_t retagged : 1 = 0;
  std::uint64_t captured : 1 = 0;  // has been an activation hook's
  std::uint64_t seeded : 1 = 0;    // was there before the file
  std::uint64_t fate : 8 = 0xFF;   // replay_fates.h
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

// The blocks lie one after the other as they are born, later ones in the places of the dead; a hash
// table of 8 bytes a slot finds them. (Were they in the table itself, like the ledger's, millions
// of live ones would take three times the time and the memory.) Not thread safe; a pointer holds
// until its block is erased.
class ReplayTable {
 public:
  [[nodiscard]] static std::uint64_t key(const Event& event) {
    return std::uint64_t{event.device} << 48 | event.address;
  }

  // Where the key would be looked up: worth a prefetch some events before it is needed, since of
  // a table with millions of blocks hardly any of it is in a cache.
  [[nodiscard]] const void* home(std::uint64_t key) const {
    return slots_.prefetch_address(hash_of(key));
  }

  // As new, but for its memory, which it keeps.
  void clear() {
    slots_.clear();
    used_ = 0;
    unused_.clear();
  }

  [[nodiscard]] ReplayBlock* find(std::uint64_t key) {
    const std::uint64_t hash = hash_of(key);
    const Slot* slot = slots_.find(hash, [&](const Slot& candidate) {
      return candidate.tag == hash >> 32U && at(candidate.place).key == key;
    });
    return slot == nullptr ? nullptr : &at(slot->place);
  }

  // The key must not be there yet.
  ReplayBlock* insert(const ReplayBlock& block) {
    const std::uint64_t hash = hash_of(block.key);
    const std::uint32_t place = unused_place();
    *slots_.try_emplace(hash, [](const Slot&) { return false; }).first = {
        .tag = static_cast<std::uint32_t>(hash >> 32U), .place = place};
    return &(at(place) = block);
  }

  void erase(ReplayBlock* block) {
    Slot* slot = slots_.find(hash_of(block->key),
                             [&](const Slot& candidate) { return &at(candidate.place) == block; });
    unused_.push_back(slot->place);
    block->key = kEmpty;
    slots_.erase(slot);
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
    std::uint32_t tag = 0;    // the upper half of the key's hash
    std::uint32_t place = 0;  // of the block, from 1 (the last: 128 GiB of blocks); 0: empty

    [[nodiscard]] bool used() const noexcept { return place != 0; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return std::uint64_t{tag} << 32U; }
  };

  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  static constexpr unsigned kFirstBits = 12;
  static constexpr std::size_t kChunk = 4096;  // blocks; chunks are never moved

  [[nodiscard]] ReplayBlock& at(std::size_t place) const {
    return chunks_[(place - 1) / kChunk][(place - 1) % kChunk];
  }

  std::uint32_t unused_place() {
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

  HashTable<Slot, 3> slots_{kFirstBits};
  std::vector<std::unique_ptr<ReplayBlock[]>> chunks_;
  std::size_t used_ = 0;               // places that hold or held a block
  std::vector<std::uint32_t> unused_;  // those of them that hold none now
};

}  // namespace opacus_memprof
