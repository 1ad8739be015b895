// SPDX-License-Identifier: Apache-2.0
// One pass over an event file that keeps the table of live blocks and tells a visitor what happens.
#pragma once

#include <cstdint>

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
// and at the end once: ended(table). Events with a phase or category that has no name arrive with 0
// in their place. Counts the contradictions in `result`, and the events read.
template <typename Visitor>
void walk(EventReader& reader, Visitor& visitor, ReplayResult& result) {
  ReplayTable table;
  std::uint64_t births = 0;
  std::uint64_t index = 0;
  result.unknown_frees = result.unknown_retags = result.double_allocations = 0;
  result.category_mismatches = result.unreadable = 0;

  const auto hooked = [](const Event& event) -> std::uint64_t {
    const auto category = static_cast<Category>(event.category);
    return category == Category::activation_hooks_shared ||
           category == Category::activation_hooks_opacus_only;
  };
  const auto give_birth = [&](const Event& event) {
    if (ReplayBlock* stale = table.find(ReplayTable::key(event)); stale != nullptr) {
      ++result.double_allocations;
      visitor.died(*stale, event);
      table.erase(stale);
    }
    ReplayBlock block;
    block.key = ReplayTable::key(event);
    block.birth = births++;
    block.captured = hooked(event);
    block.seeded = static_cast<EventKind>(event.kind) == EventKind::seed;
    block.stream = event.stream;
    block.thread = event.thread;
    block.size = event.size;
    block.category = event.category;
    block.phase = event.phase;
    block.step = static_cast<std::uint32_t>(event.step);
    block.module = static_cast<std::uint16_t>(event.module);
    block.op = static_cast<std::uint16_t>(event.op);
    visitor.born(*table.insert(block));
  };
  const auto kill = [&](const Event& event) {
    ReplayBlock* block = table.find(ReplayTable::key(event));
    if (block == nullptr) {
      ++result.unknown_frees;
      return;
    }
    if (block->category != event.category) ++result.category_mismatches;
    visitor.died(*block, event);
    table.erase(block);
  };
  const auto retag = [&](const Event& event) {
    ReplayBlock* block = table.find(ReplayTable::key(event));
    if (block == nullptr) {
      ++result.unknown_retags;
      return;
    }
    if (block->category != event.op) ++result.category_mismatches;
    const auto before = static_cast<std::uint8_t>(block->category);
    block->category = event.category;
    block->module = static_cast<std::uint16_t>(event.module);
    if (hooked(event)) block->captured = 1;
    visitor.retagged(*block, before);
    block->retagged = 1;
  };

  reader.rewind();
  for (auto records = reader.next(); !records.empty(); records = reader.next()) {
    for (Event event : records) {
      if (event.phase >= kPhases || event.category >= kMaxCategories) {
        ++result.unreadable;
        if (event.phase >= kPhases) event.phase = 0;
        if (event.category >= kMaxCategories) event.category = 0;
      }
      visitor.before(event, table);
      switch (static_cast<EventKind>(event.kind)) {
        case EventKind::none:  // the rest was never written
          result.events = index;
          visitor.ended(table);
          return;
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
        case EventKind::step:
        case EventKind::phase:
        case EventKind::snapshot:
        case EventKind::oom:
          break;
        default:
          ++result.unreadable;
      }
      visitor.after(event, index++);
    }
  }
  result.events = index;
  visitor.ended(table);
}

}  // namespace opacus_memprof
