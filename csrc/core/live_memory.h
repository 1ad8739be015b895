// SPDX-License-Identifier: Apache-2.0
// The live blocks of all devices, their total bytes, and how often Opacus has captured each. Not
// thread safe: the recorder's lock guards it.
#pragma once

#include <array>
#include <cstdint>
#include <new>
#include <unordered_map>
#include <utility>

#include "core/clock.h"
#include "core/counters.h"
#include "core/device.h"
#include "core/ledger.h"
#include "core/tag.h"

namespace opacus_memprof {

// Distinguishes a block from a later one at the same address.
struct BlockId {
  std::uint64_t address = 0;
  std::uint32_t serial = 0;
};

class LiveMemory {
 public:
  // The address to prefetch before the block is looked up or inserted.
  [[nodiscard]] const void* prefetch_address(std::uint64_t address) const noexcept {
    return ledger_.prefetch_address(address);
  }
  [[nodiscard]] const DeviceCounters* first_gpu() const noexcept { return &counters_[1]; }

  // nullptr if there is none. Pointers are valid until the next insertion or erasure.
  [[nodiscard]] Block* find(std::uint64_t address) noexcept { return ledger_.find(address); }
  [[nodiscard]] Block* find(BlockId id) noexcept {
    Block* block = ledger_.find(id.address);
    return block != nullptr && block->serial == id.serial ? block : nullptr;
  }

  // Returns the block at this address, and whether it is new: then only its address is set, and
  // add() must follow. Returns nullptr if the host has no memory for it.
  std::pair<Block*, bool> try_emplace(std::uint64_t address) noexcept {
    try {
      return ledger_.try_emplace(address);
    } catch (const std::bad_alloc&) {
      return {nullptr, false};
    }
  }
  // Counts a new block, whose members are set.
  void add(Block& block) noexcept {
    block.serial = next_serial_++;
    counters_[block.device].add(block.category(), block.size(), block.phase, block.step);
  }

  // Removes the block from the counters. If this ends a new maximum, closes the peak first and
  // returns it, otherwise kNoPeak.
  PeakId subtract(const Block& block) noexcept {
    DeviceCounters& counters = counters_[block.device];
    PeakId closed = kNoPeak;
    if (counters.peak_is_open()) [[unlikely]]
      closed = close_peak(block.device);
    counters.subtract(block.category(), block.size());
    return closed;
  }
  void erase(Block* block) noexcept {
    if (block->captured) [[unlikely]]
      forget_captures(block->address);
    ledger_.erase(block);
  }

  void change_category(Block& block, std::uint8_t category, std::uint8_t base) noexcept {
    counters_[block.device].move(block.category(), category, block.size());
    block.set(block.size(), category, base);
  }

  // Returns how often Opacus holds the block.
  [[nodiscard]] std::uint32_t captures_of(const Block& block) const noexcept {
    if (!block.captured) return 0;
    const auto more = more_captures_.find(block.address);
    return more == more_captures_.end() ? 1 : 1 + more->second;
  }
  // Returns true if this is the block's first capture.
  bool capture(Block& block) {
    if (block.captured) {
      ++more_captures_[block.address];
      return false;
    }
    block.captured = 1;
    return true;
  }
  // Returns true if this was the last capture of the block, which must be captured.
  bool release(Block& block) noexcept {
    const auto more = more_captures_.find(block.address);
    if (more != more_captures_.end()) {
      if (--more->second == 0) more_captures_.erase(more);
      return false;
    }
    block.captured = 0;
    return true;
  }

  // Closes the device's peak if it is open, and returns it; kNoPeak if it is not.
  [[gnu::noinline]] PeakId close_peak(Device device) noexcept {
    DeviceCounters& counters = counters_[device];
    return counters.peak_is_open() ? counters.close_peak(device, unix_ns()) : kNoPeak;
  }
  void reset_peaks(std::uint8_t phase, std::uint32_t step) noexcept {
    for (DeviceCounters& counters : counters_) counters.reset_peak(phase, step);
  }

  [[nodiscard]] DeviceCounters& counters(Device device) noexcept { return counters_[device]; }
  [[nodiscard]] std::size_t size() const noexcept { return ledger_.size(); }
  template <typename Function>  // function(block)
  void for_each_block(Function function) {
    ledger_.for_each(function);
  }
  template <typename Function>  // function(device, counters), for devices that ever had a block
  void for_each_device(Function function) {
    for (std::size_t device = 0; device < kMaxDevices; ++device) {
      if (counters_[device].seen()) function(static_cast<Device>(device), counters_[device]);
    }
  }

 private:
  [[gnu::cold, gnu::noinline]] void forget_captures(std::uint64_t address) noexcept {
    more_captures_.erase(address);
  }

  Ledger ledger_;
  std::uint32_t next_serial_ = 1;
  std::array<DeviceCounters, kMaxDevices> counters_;
  // Address → number of captures beyond the first, which the block itself stores.
  std::unordered_map<std::uint64_t, std::uint32_t> more_captures_;
};

}  // namespace opacus_memprof
