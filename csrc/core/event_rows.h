// SPDX-License-Identifier: Apache-2.0
// An event file as rows with settled categories (replay.h says what that means), for exports that
// need every event: adding up `bytes` of the rows gives what replay() says of every instant.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/event.h"

namespace opacus_memprof {

// One event, and one more of kind free where a file that contradicts itself allocates over a live
// block. Where events are missing one row of kind gap, whose `bytes` are their number, and rows of
// kinds free, retag and seed for what has become of blocks in it, as at its end. `bytes` are the
// block's for alloc, seed, free and retag of a known block; for others the event's `size`. The
// layout is that of analysis.events.ROW.
struct EventRow {
  static constexpr std::int64_t kNoBlock = -1;

  std::uint64_t event = 0;        // number of the record
  std::int64_t time_ns = 0;       // since the file was started
  std::int64_t block = kNoBlock;  // how many blocks were born before this one; of all devices
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  std::uint32_t step = 0;
  std::uint16_t module = 0;
  std::uint16_t op = 0;       // 0 for a retag
  std::uint8_t kind = 0;      // EventKind
  std::uint8_t category = 0;  // settled; for a retag, after it
  std::uint8_t before = 0;    // settled, before a retag; else as `category`
  std::uint8_t tag = 0;       // the record's own category
  std::uint8_t phase = 0;
  std::uint8_t device = 0;
  std::uint8_t stream = 0;
  std::uint8_t thread = 0;
};
static_assert(sizeof(EventRow) == 56);

// Hands all rows to `take`, in order and in pieces. Throws std::runtime_error with one sentence
// where `events_path` is no readable event file, and what `take` throws.
void for_event_rows(const std::string& events_path,
                    const std::function<void(std::span<const EventRow>)>& take);

}  // namespace opacus_memprof
