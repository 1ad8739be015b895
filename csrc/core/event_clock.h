// SPDX-License-Identifier: Apache-2.0
// The time of each event of a file, read in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/event.h"

namespace opacus_memprof {

class EventClock {
 public:
  explicit EventClock(const FileHeader& header) {
    // A process that was killed immediately left one reading only.
    if (header.last_ticks > header.start_ticks && header.last_unix_ns > header.start_unix_ns) {
      end_ = header.last_ticks - header.start_ticks;
      ns_per_tick_ = static_cast<double>(header.last_unix_ns - header.start_unix_ns) /
                     static_cast<double>(header.last_ticks - header.start_ticks);
    }
  }

  // Nanoseconds since the file was started. Events have 48 bits of ticks: about a day.
  [[nodiscard]] std::int64_t time_of(const Event& event) {
    // Clocks of different cores may differ slightly; half a lap back means another lap.
    if (ticks_ > event.time && ticks_ - event.time > kLap / 2) lap_ += kLap;
    ticks_ = event.time;
    return at(lap_ + event.time);
  }

  // Continues at these ticks after a gap; returns the time there.
  std::int64_t resume(std::uint64_t ticks) {
    ticks_ = ticks % kLap;
    lap_ = ticks - ticks_;
    return at(ticks);
  }

  // The header's last reading, or that of the last event if it is later.
  [[nodiscard]] std::int64_t end() const { return at(std::max(end_, lap_ + ticks_)); }

 private:
  static constexpr std::uint64_t kLap = std::uint64_t{1} << 48;

  [[nodiscard]] std::int64_t at(std::uint64_t ticks) const {
    return static_cast<std::int64_t>(static_cast<double>(ticks) * ns_per_tick_);
  }

  double ns_per_tick_ = 1.0;
  std::uint64_t ticks_ = 0;  // of the previous event
  std::uint64_t lap_ = 0;
  std::uint64_t end_ = 0;
};

}  // namespace opacus_memprof
