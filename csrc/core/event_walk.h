// SPDX-License-Identifier: Apache-2.0
// A pass over events that keeps the table of live blocks and tells a visitor what happens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/event.h"
#include "core/event_reader.h"
#include "core/replay_table.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

// Counts of records that contradict those before them: all 0 in a file that is whole.
struct Contradictions {
  std::uint64_t unknown_frees = 0;        // of an address where nothing lived
  std::uint64_t unknown_retags = 0;       // likewise
  std::uint64_t double_allocations = 0;   // where something lived; it counts as freed then
  std::uint64_t category_mismatches = 0;  // the category before is not the one that was replayed
  std::uint64_t unreadable = 0;  // a kind, phase or category that this release has no name for
};

// The visitor's part. Calls come in this order for each event:
//   before(event, table)     of every event
//   died(block, event)       before the block leaves the table
//   retagged(block, before)  its category was `before`; block.retagged if that is not its first one
//   born(block)
//   after(event, index)      of every event
// Events with a phase or category that has no name arrive with 0 in their place.
//
// Holds the table of live blocks, and counts the events and the contradictions among them. The
// visitor must outlive it.
template <typename Visitor>
class EventWalk {
 public:
  // `table` is an empty one, perhaps of an earlier walk.
  explicit EventWalk(Visitor& visitor, ReplayTable table = {})
      : visitor_(visitor), table_(std::move(table)) {}

  [[nodiscard]] const ReplayTable& table() const { return table_; }
  [[nodiscard]] std::uint64_t events() const { return events_; }
  [[nodiscard]] const Contradictions& contradictions() const { return contradictions_; }

  // Ends the walk. The table is empty, and as large as it has had to be.
  [[nodiscard]] ReplayTable take_table() {
    table_.clear();
    return std::move(table_);
  }

  // A whole file; at its end the visitor is told once: ended(table).
  void visit_all(EventReader& reader) {
    reader.rewind();
    bool more = true;
    for (auto records = reader.next(); more && !records.empty(); records = reader.next()) {
      constexpr std::size_t kAhead = 16;
      for (std::size_t i = 0; more && i < records.size(); ++i) {
        // Not in a function of its own: gcc 12 takes one that only prefetches for one without
        // effect.
        if (i + kAhead < records.size()) {
          __builtin_prefetch(table_.home(ReplayTable::key(records[i + kAhead])), 1);
        }
        more = visit(records[i]);
      }
    }
    visitor_.ended(table_);
  }

  // The next record of the file. False for one that was never written: the end of what a live or
  // killed process wrote.
  bool visit(Event event) {
    if (static_cast<EventKind>(event.kind) == EventKind::none) return false;
    if (event.phase >= kPhases || event.category >= kMaxCategories) {
      ++contradictions_.unreadable;
      if (event.phase >= kPhases) event.phase = 0;
      if (event.category >= kMaxCategories) event.category = 0;
    }
    visitor_.before(event, table_);
    switch (static_cast<EventKind>(event.kind)) {
      case EventKind::alloc:
      case EventKind::seed:
        give_birth(event);
        break;
      case EventKind::free:
        kill(event);
        break;
      case EventKind::retag:
        retag(event);
        break;
      case EventKind::none:
      case EventKind::step:
      case EventKind::phase:
      case EventKind::snapshot:
      case EventKind::oom:
        break;
      default:
        ++contradictions_.unreadable;
    }
    visitor_.after(event, events_++);
    return true;
  }

 private:
  static bool hooked(const Event& event) {
    const auto category = static_cast<Category>(event.category);
    return category == Category::activation_hooks_shared ||
           category == Category::activation_hooks_opacus_only;
  }

  void give_birth(const Event& event) {
    if (ReplayBlock* stale = table_.find(ReplayTable::key(event)); stale != nullptr) {
      ++contradictions_.double_allocations;
      visitor_.died(*stale, event);
      table_.erase(stale);
    }
    ReplayBlock block;
    block.key = ReplayTable::key(event);
    block.birth = births_++;
    block.captured = hooked(event) ? 1 : 0;
    block.seeded = static_cast<EventKind>(event.kind) == EventKind::seed;
    block.stream = event.stream;
    block.thread = event.thread;
    block.size = event.size;
    block.category = event.category;
    block.phase = event.phase;
    block.step = static_cast<std::uint32_t>(event.step);
    block.module = static_cast<std::uint16_t>(event.module);
    block.op = static_cast<std::uint16_t>(event.op);
    visitor_.born(*table_.insert(block));
  }

  void kill(const Event& event) {
    ReplayBlock* block = table_.find(ReplayTable::key(event));
    if (block == nullptr) {
      ++contradictions_.unknown_frees;
      return;
    }
    if (block->category != event.category) ++contradictions_.category_mismatches;
    visitor_.died(*block, event);
    table_.erase(block);
  }

  void retag(const Event& event) {
    ReplayBlock* block = table_.find(ReplayTable::key(event));
    if (block == nullptr) {
      ++contradictions_.unknown_retags;
      return;
    }
    if (block->category != event.op) ++contradictions_.category_mismatches;
    const auto before = static_cast<std::uint8_t>(block->category);
    block->category = event.category;
    block->module = static_cast<std::uint16_t>(event.module);
    if (hooked(event)) block->captured = 1;
    visitor_.retagged(*block, before);
    block->retagged = 1;
  }

  Visitor& visitor_;
  ReplayTable table_;
  std::uint64_t events_ = 0;
  Contradictions contradictions_;
  std::uint64_t births_ = 0;
};

}  // namespace opacus_memprof
