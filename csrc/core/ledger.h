// SPDX-License-Identifier: Apache-2.0
// The live blocks, by address. Not thread safe: the recorder's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/hash_table.h"
#include "core/hot_memory.h"

namespace opacus_memprof {

// Half a cache line, because the table is the largest object that an allocation touches.
class Block {
 public:
  std::uint64_t address = 0;  // 0 marks an empty slot

  [[nodiscard]] bool used() const noexcept { return address != 0; }
  [[nodiscard]] std::uint64_t hash() const noexcept { return hash_of_address(address); }
  [[nodiscard]] static std::uint64_t hash_of_address(std::uint64_t address) noexcept {
    return hash_of(address >> 6U);  // allocators align to 64 bytes or more
  }

  // Requested bytes; present category; category once no capture holds it. One word, as in the event
  // file: writing its parts and reading it as a whole would stall.
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
  std::uint32_t serial = 0;  // distinguishes a block from a later one at its address
  std::uint16_t module = 0;
  std::uint16_t op = 0;
  std::uint8_t device = 0;
  std::uint8_t stream = 0;
  std::uint8_t thread = 0;
  std::uint8_t phase : 6 = 0;     // of birth
  std::uint8_t captured : 1 = 0;  // whether Opacus holds it; the recorder counts how often
  std::uint8_t seeded : 1 = 0;    // existed before the profiler; its free may be unseen
};
static_assert(sizeof(Block) == 32);

class Ledger {
 public:
  // nullptr if there is none. Pointers are valid until the next insertion or erasure.
  [[nodiscard]] Block* find(std::uint64_t address) noexcept {
    return blocks_.find(Block::hash_of_address(address),
                        [=](const Block& block) { return block.address == address; });
  }
  // Returns the block at this address (not 0) and whether it is new. A new block is empty except
  // for its address. This needs one search. May throw std::bad_alloc when the table must grow.
  std::pair<Block*, bool> try_emplace(std::uint64_t address) {
    const auto found =
        blocks_.try_emplace(Block::hash_of_address(address),
                            [=](const Block& block) { return block.address == address; });
    found.first->address = address;
    return found;
  }
  void erase(Block* block) noexcept { blocks_.erase(block); }

  // The address to prefetch before the block is looked up or inserted.
  [[nodiscard]] const void* prefetch_address(std::uint64_t address) const noexcept {
    return blocks_.prefetch_address(Block::hash_of_address(address));
  }
  [[nodiscard]] std::size_t size() const noexcept { return blocks_.size(); }
  template <typename Function>
  void for_each(Function function) {
    blocks_.for_each(function);
  }

 private:
  static constexpr unsigned kFirstBits = 13;  // 256 KiB: 4096 live blocks before it grows
  HashTable<Block, 2, HotAllocator<Block>> blocks_{kFirstBits};
};

}  // namespace opacus_memprof
