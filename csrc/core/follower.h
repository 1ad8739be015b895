// SPDX-License-Identifier: Apache-2.0
// The live memory of an event file that may still be written. Each call continues where the last
// one ended. The writer is not affected: its pages are read, never locked.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "core/counters.h"
#include "core/event.h"
#include "core/event_reader.h"
#include "core/event_walk.h"

namespace opacus_memprof {

// Not thread safe.
class Follower {
 public:
  static constexpr std::size_t kRecentSteps = 120;

  struct Device {
    std::uint8_t id = 0;
    std::int64_t bytes = 0;  // requested and live
    std::int64_t peak_bytes = 0;
    std::uint32_t peak_step = 0;
    std::deque<std::int64_t> step_ends;  // bytes at the ends of the newest kRecentSteps steps
    CategoryBytes categories{};          // as in the live counters; their sum is `bytes`
    std::map<std::uint16_t, CategoryBytes> modules;
  };

  // Throws std::runtime_error with one sentence: unreadable, truncated, not an event file, or of
  // another format version.
  explicit Follower(const std::string& path);

  // Reads the events that were written since the last call; returns their number, including those
  // of gaps.
  std::uint64_t advance();

  [[nodiscard]] const FileHeader& header() const { return reader_.header(); }
  [[nodiscard]] const std::map<std::uint8_t, Device>& devices() const { return devices_; }
  [[nodiscard]] std::uint64_t events() const { return walk_.events(); }
  [[nodiscard]] const Contradictions& contradictions() const { return walk_.contradictions(); }
  [[nodiscard]] std::uint32_t step() const { return step_; }
  [[nodiscard]] std::uint64_t logical_step() const { return logical_step_; }
  [[nodiscard]] std::uint8_t phase() const { return phase_; }
  [[nodiscard]] std::uint64_t out_of_memory() const { return out_of_memory_; }

  // The visitor's part of EventWalk.
  void before(const Event&, const ReplayTable&) {}
  void born(const ReplayBlock& block);
  void died(const ReplayBlock& block, const Event& event);
  void retagged(const ReplayBlock&, std::uint8_t) {}
  void gap(const EventGap&, const ReplayTable&) {}
  void outcome_known(const ReplayBlock&, std::uint16_t) {}
  void resumed(const Opening& opening, const Births&) { logical_step_ = opening.logical_step; }
  void after(const Event& event, std::uint64_t index);

 private:
  Device& device_of(const ReplayBlock& block);
  void add_up();

  EventReader reader_;
  EventWalk<Follower> walk_;
  std::map<std::uint8_t, Device> devices_;
  std::uint32_t step_ = 0;
  std::uint64_t logical_step_ = 0;
  std::uint8_t phase_ = 0;  // of the newest event
  std::uint64_t out_of_memory_ = 0;
};

}  // namespace opacus_memprof
