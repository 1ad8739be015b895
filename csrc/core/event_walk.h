// SPDX-License-Identifier: Apache-2.0
// A pass over events that maintains the table of live blocks and notifies a visitor.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/births.h"
#include "core/event.h"
#include "core/event_reader.h"
#include "core/replay_table.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

// Counts of records that contradict earlier ones: all 0 in an intact file.
struct Contradictions {
  std::uint64_t unknown_frees = 0;        // of an address without a live block
  std::uint64_t unknown_retags = 0;       // of an address without a live block
  std::uint64_t double_allocations = 0;   // over a live block, which then counts as freed
  std::uint64_t category_mismatches = 0;  // the previous category is not the replayed one
  std::uint64_t unreadable = 0;  // a kind, phase or category that this release does not know
};

// A gap between two events.
struct EventGap {
  std::uint64_t first_event = 0;     // number of events before it
  const Opening* opening = nullptr;  // of the piece after it
  std::bitset<256> devices;          // devices on which blocks were allocated or freed
};

// The visitor's calls. For each event they come in this order:
//   before(event, table)      for every event
//   died(block, event)        before the block leaves the table
//   retagged(block, before)   its category was `before`; block.retagged if that is not its first
//   born(block)
//   after(event, index)       for every event
// Events with an unknown phase or category arrive with 0 instead. For a gap:
//   gap(gap, table)           the table has the blocks that were live before the gap
//   died(block, event)        in the gap; the event is of kind none
//   outcome_known(block, module) the block lives on; block.outcome and module are now known
//   retagged(block, before)   in the gap
//   born(block)               in the gap, and live after it
//   resumed(opening, births)
// Between events outcome_known(block, module) reports the later outcome of a block.
template <typename Visitor>
concept EventVisitor = requires(Visitor& visitor, const Event& event, const ReplayTable& table,
                                ReplayBlock& block, std::uint8_t before, std::uint16_t module,
                                std::uint64_t index, const EventGap& gap, const Opening& opening,
                                const Births& births) {
  visitor.before(event, table);
  visitor.died(block, event);
  visitor.retagged(block, before);
  visitor.born(block);
  visitor.after(event, index);
  visitor.gap(gap, table);
  visitor.outcome_known(block, module);
  visitor.resumed(opening, births);
};

// Additionally called when the run is over: ended(table).
template <typename Visitor>
concept RunVisitor = EventVisitor<Visitor> && requires(Visitor& visitor, const ReplayTable& table) {
  visitor.ended(table);
};

// Holds the table of live blocks, and counts the events and the contradictions among them. The
// visitor must outlive it. Its class may contain the walk, so each function checks that it is an
// EventVisitor: by then the class is complete.
template <typename Visitor>
class EventWalk {
 public:
  // `table` is an empty one, perhaps of an earlier walk.
  explicit EventWalk(Visitor& visitor, ReplayTable table = {})
      : visitor_(visitor), table_(std::move(table)) {}

  [[nodiscard]] const ReplayTable& table() const { return table_; }
  [[nodiscard]] std::uint64_t events() const { return events_; }
  [[nodiscard]] const Contradictions& contradictions() const { return contradictions_; }
  // Returns the block with this key; nullptr if there is none.
  [[nodiscard]] const ReplayBlock* find(std::uint64_t key) { return table_.find(key); }
  [[nodiscard]] const Births& births() const { return births_; }

  // Ends the walk. The table is empty and keeps its memory, for the next walk.
  [[nodiscard]] ReplayTable release_table() {
    table_.clear();
    return std::move(table_);
  }

  // Visits a whole run.
  void visit_all(EventReader& reader) requires RunVisitor<Visitor> {
    reader.rewind();
    read_on(reader);
    visitor_.ended(table_);
  }

  // Visits the events that the reader has not read yet.
  void read_on(EventReader& reader) requires EventVisitor<Visitor> {
    while (reader.next()) {
      const std::span<const Event> records = reader.records();
      if (reader.opening() != nullptr) {
        resume(*reader.opening(), records);
        continue;
      }
      visit(records);
    }
  }

  void visit(std::span<const Event> events) requires EventVisitor<Visitor> {
    constexpr std::size_t kAhead = 16;
    for (std::size_t i = 0; i < events.size(); ++i) {
      // Not in a separate function: gcc 12 drops calls of functions that only prefetch.
      if (i + kAhead < events.size()) {
        __builtin_prefetch(table_.home(ReplayTable::key(events[i + kAhead])), 1);
      }
      visit(events[i]);
    }
  }

  void visit(Event event) requires EventVisitor<Visitor> {
    if (static_cast<EventKind>(event.kind) == EventKind::settled) {
      settle(event);
      return;
    }
    make_readable(event);
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
  }

  // Continues after a gap. These blocks were live at its end (a piece's live set, by birth).
  void resume(const Opening& opening, std::span<const Event> seeds) requires EventVisitor<Visitor> {
    EventGap gap{.first_event = events_, .opening = &opening, .devices = {}};
    std::unordered_map<std::uint64_t, std::uint64_t> live;  // birth in the run by key
    for (const Event& seed : seeds) live[ReplayTable::key(seed)] = seed_state(seed).birth;
    std::vector<std::uint64_t> dead;
    table_.for_each([&](const ReplayBlock& block) {
      const auto found = live.find(block.key);
      if (found != live.end() && found->second == births_.in_run(block.birth)) {
        live.erase(found);
      } else {
        dead.push_back(block.key);
        gap.devices.set(block.device());
      }
    });
    for (const auto& [key, birth] : live) gap.devices.set(key >> 48U);
    visitor_.gap(gap, table_);
    for (const std::uint64_t key : dead) {
      ReplayBlock* block = table_.find(key);
      visitor_.died(*block, Event{});
      table_.erase(block);
    }
    for (Event seed : seeds) {
      make_readable(seed);
      if (ReplayBlock* block = table_.find(ReplayTable::key(seed)); block != nullptr) {
        live_on(*block, seed);
      } else {
        ReplayBlock born = block_of(seed, births_.add(seed_state(seed).birth));
        set_state(born, seed);
        visitor_.born(*table_.insert(born));
      }
    }
    births_.resume(opening.births);
    events_ = opening.first_event;
    visitor_.resumed(opening, births_);
  }

 private:
  void make_readable(Event& event) {
    if (event.phase < kPhases && event.category < kMaxCategories) return;
    ++contradictions_.unreadable;
    if (event.phase >= kPhases) event.phase = 0;
    if (event.category >= kMaxCategories) event.category = 0;
  }

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
    visitor_.born(*table_.insert(block_of(event, births_.add())));
  }

  static ReplayBlock block_of(const Event& event, std::uint64_t birth) {
    ReplayBlock block;
    block.key = ReplayTable::key(event);
    block.birth = birth & ((std::uint64_t{1} << 37U) - 1);
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
    return block;
  }

  static void set_state(ReplayBlock& block, const Event& seed) {
    const SeedState state = seed_state(seed);
    block.retagged = state.retagged;
    block.captured = state.captured;
    block.seeded = state.seeded;
    block.outcome = state.outcome;
  }

  void live_on(ReplayBlock& block, const Event& seed) {
    const auto before = static_cast<std::uint8_t>(block.category);
    const bool changed = before != seed.category || block.module != seed.module;
    set_state(block, seed);
    block.category = seed.category;
    block.module = static_cast<std::uint16_t>(seed.module);
    visitor_.outcome_known(block, block.module);
    if (changed) visitor_.retagged(block, before);
  }

  void settle(const Event& event) {
    ReplayBlock* block = table_.find(ReplayTable::key(event));
    if (block == nullptr) return;
    block->outcome = event.category;
    visitor_.outcome_known(*block, static_cast<std::uint16_t>(event.module));
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
  Births births_;
};

}  // namespace opacus_memprof
