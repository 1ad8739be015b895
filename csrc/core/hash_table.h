// SPDX-License-Identifier: Apache-2.0
// A hash table with open addressing, linear probing and backward-shift deletion. A look-up reads
// about one cache line, memory is allocated only when the table grows, and millions of insertions
// and erasures leave no tombstones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace opacus_memprof {

// Addresses are multiples of 64 or 512: the product's high bits depend on every bit of the key.
constexpr std::uint64_t hash_of(std::uint64_t key) noexcept { return key * 0x9E3779B97F4A7C15ULL; }

// A slot has used() and the hash() of its key; a new slot is unused. At most kFullQuarters quarters
// of the table are full. Not thread safe; pointers to slots are valid until the next insertion or
// erasure.
template <typename Slot, std::size_t kFullQuarters, typename Allocator = std::allocator<Slot>>
class HashTable {
 public:
  explicit HashTable(unsigned first_bits)
      : slots_(std::size_t{1} << first_bits), mask_(slots_.size() - 1), shift_(64 - first_bits) {}

  // Returns the slot of this hash for which `is_it(slot)`; nullptr if there is none.
  template <typename Predicate>
  [[nodiscard]] Slot* find(std::uint64_t hash, Predicate is_it) noexcept {
    Slot* slot = &slots_[probe(hash, is_it)];
    return slot->used() ? slot : nullptr;
  }

  // Does what find does, but if there is none, returns an unused slot and true. The caller must
  // make it a used slot of this hash. May throw std::bad_alloc when the table must grow.
  template <typename Predicate>
  std::pair<Slot*, bool> try_emplace(std::uint64_t hash, Predicate is_it) {
    if (size_ >= most()) [[unlikely]]
      grow();
    Slot* slot = &slots_[probe(hash, is_it)];
    const bool added = !slot->used();
    size_ += added ? 1 : 0;
    return {slot, added};
  }

  // Closes the gap: moves back every later slot of the run whose home is not after the gap.
  void erase(Slot* slot) noexcept {
    auto gap = static_cast<std::size_t>(slot - slots_.data());
    for (std::size_t i = next(gap); slots_[i].used(); i = next(i)) {
      const std::size_t from_home = (i - home(slots_[i].hash())) & mask_;
      const std::size_t from_gap = (i - gap) & mask_;
      if (from_home >= from_gap) {
        slots_[gap] = slots_[i];
        gap = i;
      }
    }
    slots_[gap] = {};
    --size_;
  }

  // Empties the table, which keeps its memory.
  void clear() noexcept {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    size_ = 0;
  }

  // The address to prefetch before a slot of this hash is looked up: at or near the slot.
  [[nodiscard]] const void* prefetch_address(std::uint64_t hash) const noexcept {
    return &slots_[home(hash)];
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  template <typename Function>
  void for_each(Function function) {
    for (Slot& slot : slots_) {
      if (slot.used()) function(slot);
    }
  }

 private:
  // Maximum number of used slots.
  [[nodiscard]] std::size_t most() const noexcept { return (mask_ + 1) / 4 * kFullQuarters; }
  [[nodiscard]] std::size_t home(std::uint64_t hash) const noexcept { return hash >> shift_; }
  [[nodiscard]] std::size_t next(std::size_t slot) const noexcept { return (slot + 1) & mask_; }

  template <typename Predicate>
  [[nodiscard]] std::size_t probe(std::uint64_t hash, Predicate is_it) const noexcept {
    std::size_t slot = home(hash);
    while (slots_[slot].used() && !is_it(slots_[slot])) slot = next(slot);
    return slot;
  }

  [[gnu::cold, gnu::noinline]] void grow() {
    const auto before = std::exchange(slots_, decltype(slots_)(slots_.size() * 2));
    mask_ = slots_.size() - 1;
    --shift_;
    for (const Slot& slot : before) {
      if (slot.used()) slots_[probe(slot.hash(), [](const Slot&) { return false; })] = slot;
    }
  }

  std::vector<Slot, Allocator> slots_;
  std::size_t mask_;  // slots_.size() - 1
  unsigned shift_;
  std::size_t size_ = 0;
};

}  // namespace opacus_memprof
