// SPDX-License-Identifier: Apache-2.0
// The live bytes of one device by category, and their values at the maximum. Not thread safe: the
// recorder's lock guards them.
#pragma once

#include <array>
#include <cstdint>

#include "core/device.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

using CategoryBytes = std::array<std::int64_t, kMaxCategories>;

// Identifies a peak among those of its device: a number above the device's byte. 0 is none.
using PeakId = std::uint64_t;
inline constexpr PeakId kNoPeak = 0;
constexpr Device device_of(PeakId peak) noexcept { return static_cast<Device>(peak); }

// The counters at the instant of the highest total. This is the last moment before the first free
// that follows it, so that blocks which are retagged meanwhile count under their final category.
struct Peak {
  PeakId id = kNoPeak;
  std::int64_t requested = 0;
  // The allocator's own counts at that instant; -1 if it does not count.
  std::int64_t upstream_requested = -1;
  std::int64_t upstream_allocated = -1;
  std::int64_t upstream_reserved = -1;
  std::uint64_t unix_ns = 0;
  std::uint32_t step = 0;
  std::uint8_t phase = 0;
  CategoryBytes categories{};
};

// The most bytes that the allocator has reserved from the device; -1 if it reserves none, or does
// not count them.
struct ReservedPeak {
  std::int64_t bytes = -1;
  std::uint32_t step = 0;
  std::uint8_t phase = 0;
};

class alignas(64) DeviceCounters {
 public:
  // `phase` and `step` belong to the allocation, and to the peak if it makes one.
  void add(std::uint8_t category, std::uint64_t bytes, std::uint8_t phase,
           std::uint32_t step) noexcept {
    categories_[category] += static_cast<std::int64_t>(bytes);
    total_ += static_cast<std::int64_t>(bytes);
    seen_ = true;
    newest_phase_ = phase;
    if (total_ > highest_) {
      highest_ = total_;
      highest_phase_ = phase;
      highest_step_ = step;
      peak_is_open_ = true;
    }
  }
  void move(std::uint8_t from, std::uint8_t to, std::uint64_t bytes) noexcept {
    categories_[from] -= static_cast<std::int64_t>(bytes);
    categories_[to] += static_cast<std::int64_t>(bytes);
  }
  // The caller closes an open peak first.
  void subtract(std::uint8_t category, std::uint64_t bytes) noexcept {
    categories_[category] -= static_cast<std::int64_t>(bytes);
    total_ -= static_cast<std::int64_t>(bytes);
  }

  // Returns whether the total is at a new maximum that `peak` does not contain yet.
  [[nodiscard]] bool peak_is_open() const noexcept { return peak_is_open_; }
  PeakId close_peak(Device device, std::uint64_t unix_ns) noexcept {
    peak_ = Peak{.id = (((peak_.id >> 8U) + 1) << 8U) | device,
                 .requested = total_,
                 .unix_ns = unix_ns,
                 .step = highest_step_,
                 .phase = highest_phase_,
                 .categories = categories_};
    peak_is_open_ = false;
    return peak_.id;
  }
  void reset_peak(std::uint8_t phase, std::uint32_t step) noexcept {
    highest_ = total_;
    highest_phase_ = phase;
    highest_step_ = step;
    peak_is_open_ = true;
    reserved_ = {};
  }

  // Returns whether the device has had a block.
  [[nodiscard]] bool seen() const noexcept { return seen_; }
  [[nodiscard]] Peak& peak() noexcept { return peak_; }
  [[nodiscard]] ReservedPeak& reserved() noexcept { return reserved_; }
  [[nodiscard]] const ReservedPeak& reserved() const noexcept { return reserved_; }
  [[nodiscard]] std::uint8_t newest_phase() const noexcept { return newest_phase_; }
  [[nodiscard]] std::int64_t highest() const noexcept { return highest_; }
  [[nodiscard]] std::int64_t total() const noexcept { return total_; }
  [[nodiscard]] const CategoryBytes& categories() const noexcept { return categories_; }

 private:
  std::int64_t total_ = 0;
  std::int64_t highest_ = 0;
  std::uint32_t highest_step_ = 0;
  std::uint8_t highest_phase_ = 0;
  std::uint8_t newest_phase_ = 0;
  bool peak_is_open_ = false;
  bool seen_ = false;
  CategoryBytes categories_{};
  Peak peak_;
  ReservedPeak reserved_;
};

}  // namespace opacus_memprof
