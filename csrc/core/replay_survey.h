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
#include "core/replay.h"
#include "core/replay_fates.h"

namespace opacus_memprof {

// A visitor of EventWalk.
class Survey {
 public:
  Survey(const EventReader& reader, const ReplayOptions& options);

  void before(const Event&, const ReplayTable&) {}
  void born(const ReplayBlock& block);
  void died(const ReplayBlock& block, const Event& event);
  void retagged(const ReplayBlock& block, std::uint8_t before) { fates_.retagged(block, before); }
  void after(const Event& event, std::uint64_t index);
  void ended(const ReplayTable& table);

  [[nodiscard]] const Fates& fates() const { return fates_; }

  // The devices with every instant in place and all categories 0. Ends the survey.
  [[nodiscard]] std::vector<ReplayResult::Device> devices();

 private:
  using Instant = ReplayResult::Instant;

  struct StepRow {
    std::uint32_t number = 0;
    Instant peak;
    std::int64_t end_bytes = 0;
    bool complete = false;
  };

  struct DeviceState {
    ReplayResult::Device result;
    std::int64_t bytes = 0;
    std::vector<StepRow> steps;
    std::uint64_t bucket = ReplayResult::kNever;  // of the timeline's last row
  };

  DeviceState& state(std::uint8_t device);
  void tell_time(const Event& event, std::uint64_t index);
  void end_step(const Event& event);
  void observe(DeviceState& device);
  static void choose_steps(DeviceState& device);

  const FileHeader& header_;
  EventClock clock_;
  std::uint64_t bucket_events_;

  Fates fates_;
  std::array<std::unique_ptr<DeviceState>, 256> devices_;
  Instant now_;
  std::optional<std::uint32_t> step_;  // the running one, once an event other than a seed has told
};

}  // namespace opacus_memprof
