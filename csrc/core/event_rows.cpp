// SPDX-License-Identifier: Apache-2.0
#include "core/event_rows.h"

#include <cstddef>
#include <vector>

#include "core/event_clock.h"
#include "core/event_reader.h"
#include "core/event_walk.h"
#include "core/replay_outcomes.h"
#include "core/replay_survey.h"

namespace opacus_memprof {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 16;

// A visitor of EventWalk, for the second pass.
class Rows {
 public:
  Rows(const Survey& survey, const FileHeader& header,
       const std::function<void(std::span<const EventRow>)>& take)
      : outcomes_(survey.outcomes()), gaps_(survey.gaps()), clock_(header), take_(take) {
    rows_.reserve(kPiece + 1);
  }

  void before(const Event& event, const ReplayTable&) {
    const bool retag = static_cast<EventKind>(event.kind) == EventKind::retag;
    row_ = {.event = index_,
            .time_ns = clock_.time_of(event),
            .bytes = event.size,
            .address = event.address,
            .step = static_cast<std::uint32_t>(event.step),
            .module = static_cast<std::uint16_t>(event.module),
            .op = static_cast<std::uint16_t>(retag ? 0 : event.op),
            .kind = static_cast<std::uint8_t>(event.kind),
            .category = static_cast<std::uint8_t>(event.category),
            .before = static_cast<std::uint8_t>(event.category),
            .tag = static_cast<std::uint8_t>(event.category),
            .phase = static_cast<std::uint8_t>(event.phase),
            .device = static_cast<std::uint8_t>(event.device),
            .stream = static_cast<std::uint8_t>(event.stream),
            .thread = static_cast<std::uint8_t>(event.thread)};
  }

  void born(const ReplayBlock& block) {
    tell_block(row_, block);
    if (in_gap_) add(EventKind::seed, block);
  }

  void died(const ReplayBlock& block, const Event& event) {
    if (in_gap_) {
      add(EventKind::free, block);
      return;
    }
    if (static_cast<EventKind>(event.kind) == EventKind::free) {
      tell_block(row_, block);
      return;
    }
    EventRow stale = row_;
    stale.kind = static_cast<std::uint8_t>(EventKind::free);
    tell_block(stale, block);
    rows_.push_back(stale);
  }

  void retagged(const ReplayBlock& block, std::uint8_t before) {
    tell_block(row_, block);
    row_.before = outcomes_.settled(before, block.birth);
    if (in_gap_) add(EventKind::retag, block, row_.before);
  }

  void outcome_known(const ReplayBlock&, std::uint16_t) {}

  void gap(const EventGap& gap, const ReplayTable&) {
    add_gap(gap.first_event);
    in_gap_ = true;
    index_ = gap.opening->first_event;
    gap_end_ns_ = clock_.resume(gap.opening->ticks);
  }

  void resumed(const Opening&, const Births&) { in_gap_ = false; }

  void after(const Event&, std::uint64_t) {
    ++index_;
    rows_.push_back(row_);
    if (rows_.size() >= kPiece) hand_over();
  }

  void ended(const ReplayTable&) {
    add_gap(index_);
    hand_over();
  }

 private:
  // Adds the gap that begins at this event, if any.
  void add_gap(std::uint64_t first_event) {
    for (const ReplayResult::Gap& gap : gaps_) {
      if (gap.first_event != first_event) continue;
      rows_.push_back({.event = gap.first_event,
                       .time_ns = gap.time_ns,
                       .bytes = gap.events,
                       .step = gap.step,
                       .kind = static_cast<std::uint8_t>(EventKind::gap)});
    }
  }

  // Adds the outcome of a block in the gap.
  void add(EventKind kind, const ReplayBlock& block, std::uint8_t before) {
    EventRow row{.event = index_,
                 .time_ns = gap_end_ns_,
                 .address = block.key & ((std::uint64_t{1} << 48U) - 1),
                 .step = block.step,
                 .op = static_cast<std::uint16_t>(kind == EventKind::retag ? 0 : block.op),
                 .kind = static_cast<std::uint8_t>(kind),
                 .tag = static_cast<std::uint8_t>(block.category),
                 .phase = static_cast<std::uint8_t>(block.phase),
                 .device = block.device(),
                 .stream = static_cast<std::uint8_t>(block.stream),
                 .thread = static_cast<std::uint8_t>(block.thread)};
    tell_block(row, block);
    if (kind == EventKind::retag) row.before = before;
    rows_.push_back(row);
    if (rows_.size() >= kPiece) hand_over();
  }
  void add(EventKind kind, const ReplayBlock& block) { add(kind, block, 0); }

  void tell_block(EventRow& row, const ReplayBlock& block) const {
    row.block = static_cast<std::int64_t>(block.birth);
    row.bytes = block.size;
    row.module = block.module;
    row.category = row.before = outcomes_.settled(block.category, block.birth);
  }

  void hand_over() {
    if (!rows_.empty()) take_(rows_);
    rows_.clear();
  }

  const Outcomes& outcomes_;
  const std::vector<ReplayResult::Gap>& gaps_;
  EventClock clock_;
  const std::function<void(std::span<const EventRow>)>& take_;
  EventRow row_;
  std::uint64_t index_ = 0;
  bool in_gap_ = false;
  std::int64_t gap_end_ns_ = 0;
  std::vector<EventRow> rows_;
};

}  // namespace

void for_event_rows(const std::string& events_path,
                    const std::function<void(std::span<const EventRow>)>& take) {
  EventReader reader(events_path);
  Survey survey(reader, {});
  EventWalk first(survey);
  first.visit_all(reader);
  Rows rows(survey, reader.header(), take);
  EventWalk(rows, first.release_table()).visit_all(reader);
}

}  // namespace opacus_memprof
