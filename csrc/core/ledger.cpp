// SPDX-License-Identifier: Apache-2.0
#include "core/ledger.h"

#include <utility>

namespace opacus_memprof {

namespace {
constexpr unsigned kInitialBits = 13;  // 256 KiB: 4096 live blocks before it grows
}

Ledger::Ledger() : slots_(std::size_t{1} << kInitialBits), shift_(64 - kInitialBits) {}

void Ledger::grow() {
  decltype(slots_) old(slots_.size() * 2);
  std::swap(old, slots_);
  --shift_;
  size_ = 0;
  for (const Block& block : old) {
    if (block.address != 0) *try_emplace(block.address).first = block;
  }
}

}  // namespace opacus_memprof
