// SPDX-License-Identifier: Apache-2.0
// A pass over events that keeps the table of live blocks and tells a visitor what happens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/event.h"
#include "core/event_reader.h"
#include "core/replay.h"
#include "core/replay_table.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

// The visitor's part. Calls come in this order for each event:
//   before(event, table)     once for every event
//   died(block, event)       before the block leaves the table
//   retagged(block, before)  its category was `before`; block.retagged: it was retagged earlier,
//   too born(block) after(event, index)      once for every event
// Events with a phase or category that has no name arrive with 0 in their place.
//
// Holds the table of live blocks, takes records one by one in the file's order, and counts the
// contradictions in `result`, and the events. The visitor and the result must outlive it.
template <typename Visitor>
class EventWalk {
 public:
  // `table` is an empty one, perhaps of an earlier walk.
  EventWalk(Visitor& visitor, ReplayResult& result, ReplayTable table = {})
      : visitor_(visitor), result_(result), table_(std::move(table)) {
    result.events = 0;
    result.unknown_frees = result.unknown_retags = result.double_allocations = 0;
    result.category_mismatches = result.unreadable = 0;
  }

  [[nodiscard]] const ReplayTable& table() const { return table_; }
  // Ends the walk.
  [[nodiscard]] ReplayTable take_table() {
    table_.clear();
    return std::move(table_);
  }

  // What taking the event will need first.
  [[nodiscard]] const void* needs(const Event& event) const {
    return table_.home(ReplayTable::key(event));
  }

  // False for a record that was never written: the end of what a live or killed process wrote.
  bool take(Event event) {
    if (static_cast<EventKind>(event.kind) == EventKind::none) return false;
    if (event.phase >= kPhases || event.category >= kMaxCategories) {
      ++result_.unreadable;
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
        ++result_.unreadable;
    }
    visitor_.after(event, result_.events++);
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
      ++result_.double_allocations;
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
      ++result_.unknown_frees;
      return;
    }
    if (block->category != event.category) ++result_.category_mismatches;
    visitor_.died(*block, event);
    table_.erase(block);
  }

  void retag(const Event& event) {
    ReplayBlock* block = table_.find(ReplayTable::key(event));
    if (block == nullptr) {
      ++result_.unknown_retags;
      return;
    }
    if (block->category != event.op) ++result_.category_mismatches;
    const auto before = static_cast<std::uint8_t>(block->category);
    block->category = event.category;
    block->module = static_cast<std::uint16_t>(event.module);
    if (hooked(event)) block->captured = 1;
    visitor_.retagged(*block, before);
    block->retagged = 1;
  }

  Visitor& visitor_;
  ReplayResult& result_;
  ReplayTable table_;
  std::uint64_t births_ = 0;
};

// A whole file in one pass; at its end the visitor is told once: ended(table). Returns the table,
// empty, for the next pass: it is large enough.
template <typename Visitor>
ReplayTable walk(EventReader& reader, Visitor& visitor, ReplayResult& result,
                 ReplayTable table = {}) {
  EventWalk<Visitor> pass(visitor, result, std::move(table));
  reader.rewind();
  for (auto records = reader.next(); !records.empty(); records = reader.next()) {
    constexpr std::size_t kAhead = 16;
    for (std::size_t i = 0; i < records.size(); ++i) {
      // Not in a function of its own: gcc 12 takes one that only prefetches for one without effect.
      if (i + kAhead < records.size()) __builtin_prefetch(pass.needs(records[i + kAhead]), 1);
      if (!pass.take(records[i])) {
        visitor.ended(pass.table());
        return pass.take_table();
      }
    }
  }
  visitor.ended(pass.table());
  return pass.take_table();
}

}  // namespace opacus_memprof
