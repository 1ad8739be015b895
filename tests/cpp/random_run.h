// SPDX-License-Identifier: Apache-2.0
// Events of a run that never was, without end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "core/event.h"
#include "core/vocabulary.h"

namespace opacus_memprof::testing {

// Some devices, modules and threads; blocks that live for long and for short; all that happens to
// them. What a recorder writes: a free and a retag have the block's category.
class RandomRun {
 public:
  explicit RandomRun(unsigned seed) : random_(seed), devices_(1 + random_() % 3) {
    most_live_ = 5 + random_() % 80;
  }

  Event next() {
    ++time_;
    Event event = draw();
    event.time = time_ * 3;
    event.thread = thread_;
    event.step = step_;
    return event;
  }

 private:
  unsigned below(unsigned end) { return static_cast<unsigned>(random_()) % end; }

  Event mark(EventKind kind, std::uint64_t size = 0) {
    Event event{};
    event.kind = static_cast<std::uint8_t>(kind);
    event.phase = phase_;
    event.size = size;
    return event;
  }

  Event draw() {
    using enum EventKind;
    thread_ = static_cast<std::uint8_t>(below(3));
    if (time_ % 400 == 0) most_live_ = 5 + below(120);  // peaks come at any time
    const unsigned what = below(1000);
    if (what < 12) {
      ++step_;
      return mark(step, step_ / 2);
    }
    if (what < 60) {
      phase_ = static_cast<std::uint8_t>(below(kPhases));
      return mark(phase);
    }
    if (what < 64) return mark(snapshot, snapshots_++);
    if (what < 66) {
      Event failure = mark(oom, 1 << 20);
      failure.device = static_cast<std::uint8_t>(1 + below(devices_));
      return failure;
    }
    if (what < 250 && !live_.empty()) return retagged();
    const bool full = live_.size() >= most_live_;
    return !live_.empty() && (full || below(5) < 2) ? freed() : born();
  }

  Event born() {
    using enum EventKind;
    Event event = mark(alloc, 1 + below(10'000));
    event.kind = static_cast<std::uint8_t>(below(200) == 0 ? seed : alloc);
    event.address = 0x1000 + next_address_++ % 400 * 0x100;  // handed out again
    for (const Event& other : live_) {
      if (other.address == event.address) return freed();
    }
    event.device = static_cast<std::uint8_t>(1 + below(devices_));
    event.category = category();
    event.module = static_cast<std::uint16_t>(below(3) == 0 ? 0 : 1 + below(6));
    event.op = static_cast<std::uint16_t>(below(5));
    event.stream = static_cast<std::uint8_t>(below(2));
    event.step = step_;
    live_.push_back(event);
    return event;
  }

  Event freed() {
    // Mostly the newest, so that some live for very long.
    const std::size_t at = live_.size() - 1 -
                           below(static_cast<unsigned>(
                               std::min<std::size_t>(live_.size(), below(4) == 0 ? 1000 : 10)));
    Event event = live_[at];
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(at));
    event.kind = static_cast<std::uint8_t>(EventKind::free);
    event.phase = phase_;
    return event;
  }

  Event retagged() {
    Event& block = live_[below(static_cast<unsigned>(live_.size()))];
    const std::uint64_t before = block.category;
    block.category = category();
    if (below(2) == 0) block.module = static_cast<std::uint16_t>(1 + below(6));
    Event event = block;
    event.kind = static_cast<std::uint8_t>(EventKind::retag);
    event.op = before & 0xFFFFU;
    event.phase = phase_;
    return event;
  }

  // Categories that are settled later come often.
  std::uint8_t category() {
    constexpr Category kOften[] = {
        Category::forward_undecided,       Category::backward_temporaries,
        Category::optimizer_temporaries,   Category::temp_matrices,
        Category::clipping_temporaries,    Category::gradients,
        Category::activation_hooks_shared, Category::unattributed};
    if (below(4) == 0) return static_cast<std::uint8_t>(below(kBuiltinCategories));
    return static_cast<std::uint8_t>(kOften[below(std::size(kOften))]);
  }

  std::mt19937_64 random_;
  unsigned devices_;
  std::size_t most_live_ = 0;
  std::vector<Event> live_;
  std::uint64_t time_ = 0;
  std::uint64_t next_address_ = 0;
  std::uint64_t snapshots_ = 0;
  std::uint32_t step_ = 0;
  std::uint8_t phase_ = 0;
  std::uint8_t thread_ = 0;
};

}  // namespace opacus_memprof::testing
