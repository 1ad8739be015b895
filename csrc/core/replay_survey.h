// SPDX-License-Identifier: Apache-2.0
// The first pass: settles the blocks, and finds the instants that the second pass adds up.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/event_clock.h"
#include "core/event_reader.h"
#include "core/event_walk.h"
#include "core/replay.h"
#include "core/replay_outcomes.h"

namespace opacus_memprof {

// A visitor of EventWalk.
class Survey {
 public:
  Survey(const EventReader& reader, const ReplayOptions& options);

  void before(const Event&, const ReplayTable&) {}
  void born(const ReplayBlock& block);
  void died(ReplayBlock& block, const Event& event);
  void retagged(ReplayBlock& block, std::uint8_t before) { outcomes_.retagged(block, before); }
  void after(const Event& event, std::uint64_t index);
  void gap(const EventGap& gap, const ReplayTable& table);
  void outcome_known(const ReplayBlock& block, std::uint16_t module) {
    outcomes_.note_outcome(block, module);
  }
  void resumed(const Opening& opening, const Births& births) { outcomes_.resumed(opening, births); }
  void ended(const ReplayTable& table);

  [[nodiscard]] const std::vector<ReplayResult::Gap>& gaps() const { return gaps_; }
  [[nodiscard]] std::uint64_t events() const { return events_; }  // number of events that were read
  [[nodiscard]] const Outcomes& outcomes() const { return outcomes_; }

  // Returns the devices with all instants and with all categories 0. Ends the survey.
  [[nodiscard]] std::vector<ReplayResult::Device> devices();

 private:
  using Instant = ReplayResult::Instant;

  struct StepRow {
    std::uint32_t number = 0;
    Instant peak;
    std::int64_t end_bytes = 0;
    bool complete = false;
    bool whole = true;  // no gap before its end
  };

  struct SnapshotRow {
    Instant instant;
    std::uint16_t name = 0;
    std::uint64_t number = 0;
  };

  struct DeviceState {
    ReplayResult::Device result;
    std::int64_t bytes = 0;
    std::vector<StepRow> steps;
    std::vector<SnapshotRow> snapshots;
    bool in_step = false;                         // the last of them has not ended
    std::uint64_t bucket = ReplayResult::kNever;  // of the timeline's last row
  };

  DeviceState& state(std::uint8_t device);
  void set_moment(const Event& event, std::uint64_t index);
  void end_step(const Event& event);
  void observe(DeviceState& device);
  static void choose_steps(DeviceState& device);
  static void choose_snapshots(DeviceState& device);

  const EventReader& reader_;
  EventClock clock_;
  std::uint64_t bucket_events_;

  Outcomes outcomes_;
  std::array<std::unique_ptr<DeviceState>, 256> devices_;
  Instant now_;
  std::uint64_t events_ = 0;
  std::vector<ReplayResult::Gap> gaps_;
  bool in_gap_ = false;                // no event since the newest gap has shown its step
  bool after_gap_ = false;             // no step has ended since then
  std::optional<std::uint32_t> step_;  // the running step, once an event other than a seed shows it
};

}  // namespace opacus_memprof
