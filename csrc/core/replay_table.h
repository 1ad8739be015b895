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

  std::uint64_t birth : 37 = 0;  // number of blocks born before this one
  std::uint64_t retagged : 1 = 0;
  std::uint64_t captured : 1 = 0;    // whether an activation hook has captured it
  std::uint64_t seeded : 1 = 0;      // existed before the file
  std::uint64_t outcome : 8 = 0xFF;  // replay_outcomes.h
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

// The blocks are stored in the order of their births; new ones reuse the places of dead ones. A
// hash table of 8 bytes a slot finds them. (With blocks in the table itself, as in the ledger,
// millions of live ones would need three times the time and the memory.) Not thread safe; a pointer
// is valid until its block is erased.
class ReplayTable {
 public:
  [[nodiscard]] static std::uint64_t key(const Event& event) {
    return std::uint64_t{event.device} << 48 | event.address;
  }

  // The address at which the key is looked up. Prefetching it some events before it is needed is
  // worthwhile, because most of a table with millions of blocks is in no cache.
  [[nodiscard]] const void* home(std::uint64_t key) const {
    return slots_.prefetch_address(hash_of(key));
  }

  // Empties the table, which keeps its memory.
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

  // In the order of birth, except for reused places.
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
  std::vector<std::uint32_t> unused_;  // those of them that are unused now
};

}  // namespace opacus_memprof
