// SPDX-License-Identifier: Apache-2.0
// Allocations that failed: what was asked for, and what was live then. Kept apart from the event
// file, so that a full one does not cost the account of the moment that matters most.
#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include "core/device.h"
#include "core/ledger.h"
#include "core/tag.h"

namespace opacus_memprof {

// Live blocks of the same origin: category now, the rest as at birth.
struct Holding {
  std::uint64_t bytes = 0;
  std::uint64_t blocks = 0;
  std::uint64_t largest = 0;  // bytes of one block
  std::uint32_t step = 0;
  std::uint16_t module = 0;
  std::uint16_t op = 0;
  std::uint8_t category = 0;
  std::uint8_t phase = 0;
};

// What the wrapped allocator and the device say right after the failure, in bytes; -1 where nobody
// counts. Of a caching allocator, "free" is memory that it has reserved and nobody uses.
struct UpstreamAtFailure {
  std::int64_t reserved = -1;
  std::int64_t allocated = -1;        // handed out, rounding included
  std::int64_t pending = -1;          // freed, while a side stream still uses it
  std::int64_t largest_free = -1;     // one block that could be handed out
  std::int64_t free_segments = -1;    // segments without a used block: what empty_cache returns
  std::int64_t free_expandable = -1;  // free in expandable segments
  std::int64_t device_free = -1;
  std::int64_t device_total = -1;
  std::int64_t limit = -1;  // what this process may reserve
};

struct Failure {
  std::uint64_t number = 0;  // from 0 on
  std::uint64_t requested = 0;
  std::uint64_t unix_ns = 0;
  std::uint32_t step = 0;  // physical and logical steps that had ended
  std::uint32_t logical_step = 0;
  Device device = 0;
  Tag tag;                        // of the request
  std::vector<Holding> holdings;  // of that device, the largest first
  UpstreamAtFailure upstream{};
};

// The blocks of one device, by origin, the largest first.
std::vector<Holding> holdings_of(const std::vector<Block>& blocks, Device device);

// The newest failures. Not thread safe: the recorder's lock guards it, under which no memory is
// asked for or given back: its entries come and go as lists.
class FailureLog {
 public:
  static constexpr std::size_t kMaxFailures = 16;

  // `failure` has one entry, which gets its number here, or none where there was no memory for it.
  // Afterwards it has the entry that there is no room for any more, if there is one. Returns the
  // failure's number.
  std::uint64_t add(std::list<Failure>& failure) noexcept;
  void set_upstream(std::uint64_t number, const UpstreamAtFailure& upstream) noexcept;
  // The newest last.
  [[nodiscard]] const std::list<Failure>& newest() const noexcept { return newest_; }
  // Removes all failures and counts from 0 again; returns them, to be freed outside the lock.
  std::list<Failure> clear() noexcept;

 private:
  std::list<Failure> newest_;
  std::uint64_t total_ = 0;
};

}  // namespace opacus_memprof
