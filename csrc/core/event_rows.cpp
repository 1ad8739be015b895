// SPDX-License-Identifier: Apache-2.0
#include "core/event_rows.h"

#include <cstddef>
#include <vector>

#include "core/event_clock.h"
#include "core/event_reader.h"
#include "core/event_walk.h"
#include "core/replay_fates.h"
#include "core/replay_survey.h"

namespace opacus_memprof {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 16;

// A visitor of EventWalk, for the second pass.
class Rows {
 public:
  Rows(const Fates& fates, const FileHeader& header,
       const std::function<void(std::span<const EventRow>)>& take)
      : fates_(fates), clock_(header), take_(take) {
    rows_.reserve(kPiece + 1);
  }

  void before(const Event& event, const ReplayTable&) {
    const bool retag = static_cast<EventKind>(event.kind) == EventKind::retag;
    row_ = {.event = index_,
            .time_ns = clock_.tell(event),
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

  void born(const ReplayBlock& block) { tell_block(row_, block); }

  void died(const ReplayBlock& block, const Event& event) {
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
    row_.before = fates_.settled(before, block.birth);
  }

  void after(const Event&, std::uint64_t) {
    ++index_;
    rows_.push_back(row_);
    if (rows_.size() >= kPiece) hand_over();
  }

  void ended(const ReplayTable&) { hand_over(); }

 private:
  void tell_block(EventRow& row, const ReplayBlock& block) const {
    row.block = static_cast<std::int64_t>(block.birth);
    row.bytes = block.size;
    row.module = block.module;
    row.category = row.before = fates_.settled(block.category, block.birth);
  }

  void hand_over() {
    if (!rows_.empty()) take_(rows_);
    rows_.clear();
  }

  const Fates& fates_;
  EventClock clock_;
  const std::function<void(std::span<const EventRow>)>& take_;
  EventRow row_;
  std::uint64_t index_ = 0;
  std::vector<EventRow> rows_;
};

}  // namespace

void for_event_rows(const std::string& events_path,
                    const std::function<void(std::span<const EventRow>)>& take) {
  EventReader reader(events_path);
  Survey survey(reader, {});
  EventWalk first(survey);
  first.visit_all(reader);
  Rows rows(survey.fates(), reader.header(), take);
  EventWalk(rows, first.take_table()).visit_all(reader);
}

}  // namespace opacus_memprof
