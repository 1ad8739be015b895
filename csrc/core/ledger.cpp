// SPDX-License-Identifier: Apache-2.0
#include "core/ledger.h"

#include <utility>

namespace opacus_memprof {

namespace {
constexpr unsigned kInitialBits = 13;  // 256 KiB: 4096 live blocks before it grows
}

Ledger::Ledger() : slots_(std::size_t{1} << kInitialBits), shift_(64 - kInitialBits) {}

Block* Ledger::find(std::uint64_t address) noexcept {
  if (address == 0) return nullptr;
  for (std::size_t slot = home(address);; slot = next(slot)) {
    if (slots_[slot].address == address) return &slots_[slot];
    if (slots_[slot].address == 0) return nullptr;
  }
}

Block& Ledger::insert(std::uint64_t address) {
  if (2 * (size_ + 1) > slots_.size()) grow();
  ++size_;
  Block& block = empty_slot(address);
  block = {};
  block.address = address;
  return block;
}

Block& Ledger::empty_slot(std::uint64_t address) noexcept {
  std::size_t slot = home(address);
  while (slots_[slot].address != 0) slot = next(slot);
  return slots_[slot];
}

void Ledger::erase(Block* block) noexcept {
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

void Ledger::grow() {
  decltype(slots_) old(slots_.size() * 2);
  std::swap(old, slots_);
  --shift_;
  for (const Block& block : old) {
    if (block.address != 0) empty_slot(block.address) = block;
  }
}

}  // namespace opacus_memprof
