// SPDX-License-Identifier: Apache-2.0
// An event file as rows with settled categories (defined in replay.h), for exports that need every
// event. The sums of the rows' `bytes` equal the results of replay() at every instant.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/event.h"

namespace opacus_memprof {

// One event. If a contradictory file allocates over a live block, there is an additional row of
// kind free. Missing events have one row of kind gap, whose `bytes` are their number, and rows of
// kinds free, retag and seed for the outcomes of blocks in the gap, dated at its end. `bytes` are
// the block's for alloc, seed, free and retag of a known block; for others the event's `size`. The
// layout is that of analysis.events.ROW.
struct EventRow {
  static constexpr std::int64_t kNoBlock = -1;

  std::uint64_t event = 0;        // number of the record
  std::int64_t time_ns = 0;       // since the file was started
  std::int64_t block = kNoBlock;  // number of blocks born before this one, on all devices
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  std::uint32_t step = 0;
  std::uint16_t module = 0;
  std::uint16_t op = 0;       // 0 for a retag
  std::uint8_t kind = 0;      // EventKind
  std::uint8_t category = 0;  // settled; for a retag, after it
  std::uint8_t before = 0;    // settled, before a retag; otherwise equal to `category`
  std::uint8_t tag = 0;       // the record's own category
  std::uint8_t phase = 0;
  std::uint8_t device = 0;
  std::uint8_t stream = 0;
  std::uint8_t thread = 0;
};
static_assert(sizeof(EventRow) == 56);

// Passes all rows to `take`, in order and in pieces. Throws std::runtime_error with one sentence if
// `events_path` is not a readable event file, and whatever `take` throws.
void for_event_rows(const std::string& events_path,
                    const std::function<void(std::span<const EventRow>)>& take);

}  // namespace opacus_memprof
