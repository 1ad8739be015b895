// SPDX-License-Identifier: Apache-2.0
// Allocations that failed: the requests, and the live memory at that time. Stored separately from
// the event file, so that a full file does not lose the most important moment.
#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include "core/device.h"
#include "core/ledger.h"
#include "core/tag.h"

namespace opacus_memprof {

// Live blocks of the same origin: with their present category, and other fields from birth.
struct Holding {
  std::uint64_t bytes = 0;
  std::uint64_t blocks = 0;
  std::uint64_t largest = 0;  // bytes of the largest block
  std::uint32_t step = 0;
  std::uint16_t module = 0;
  std::uint16_t op = 0;
  std::uint8_t category = 0;
  std::uint8_t phase = 0;
};

// Counts of the wrapped allocator and the device right after the failure, in bytes; -1 if unknown.
// For a caching allocator, "free" is reserved memory that nobody uses.
struct UpstreamAtFailure {
  std::int64_t reserved = -1;
  std::int64_t allocated = -1;        // handed out, including rounding
  std::int64_t pending = -1;          // freed, while a side stream still uses it
  std::int64_t largest_free = -1;     // the largest block that could be handed out
  std::int64_t free_segments = -1;    // segments without a used block: empty_cache returns them
  std::int64_t free_expandable = -1;  // free in expandable segments
  std::int64_t device_free = -1;
  std::int64_t device_total = -1;
  std::int64_t limit = -1;  // limit of this process' reserved memory
};

struct Failure {
  std::uint64_t number = 0;  // from 0 on
  std::uint64_t requested = 0;
  std::uint64_t unix_ns = 0;
  std::uint32_t step = 0;  // physical and logical steps that had ended
  std::uint32_t logical_step = 0;
  Device device = 0;
  Tag tag;                        // of the request
  std::vector<Holding> holdings;  // of the same device, the largest first
  UpstreamAtFailure upstream{};
};

// Returns the blocks of one device by origin, the largest first.
std::vector<Holding> holdings_of(const std::vector<Block>& blocks, Device device);

// The newest failures. Not thread safe: the recorder's lock guards it. No memory is allocated or
// freed under this lock, so entries are passed in lists.
class FailureLog {
 public:
  static constexpr std::size_t kMaxFailures = 16;

  // `failure` has one entry, which gets its number here, or none if there was no memory for it.
  // Afterwards it has the entry that was evicted, if any. Returns the failure's number.
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
