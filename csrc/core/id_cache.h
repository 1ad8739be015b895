// SPDX-License-Identifier: Apache-2.0
// A cache of ids by the address of static data, for ids that take long to look up. Thread safe,
// without a lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace opacus_memprof {

class IdCache {
 public:
  static constexpr std::size_t kSlots = 1024;

  // Returns the id of an address. `find_id()` is called if the cache does not have it: once for
  // each address, unless threads request it at the same time or the cache is full.
  template <typename FindId>
  std::uint16_t id_of(const void* pointer, FindId find_id) {
    const auto address = reinterpret_cast<std::uint64_t>(pointer) & kAddressBits;
    for (std::size_t probe = 0; probe < kSlots; ++probe) {
      // An address above its id, so that one load reads both; 0 is an empty slot.
      std::atomic<std::uint64_t>& slot = slots_[((address >> 4U) + probe) % kSlots];
      std::uint64_t known = slot.load(std::memory_order_relaxed);
      if (known >> 16U == address) return static_cast<std::uint16_t>(known);
      if (known != 0) continue;
      const std::uint16_t id = find_id();
      if (slot.compare_exchange_strong(known, address << 16U | id, std::memory_order_relaxed) ||
          known >> 16U == address) {
        return id;
      }
    }
    return find_id();
  }

 private:
  static constexpr std::uint64_t kAddressBits = (std::uint64_t{1} << 48U) - 1;
  std::array<std::atomic<std::uint64_t>, kSlots> slots_{};
};

}  // namespace opacus_memprof
