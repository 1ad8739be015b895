// SPDX-License-Identifier: Apache-2.0
// What the recorder notes when an allocation fails: events, and a stock of what was live.
#include <algorithm>
#include <list>
#include <mutex>
#include <new>
#include <vector>

#include "core/clock.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

constexpr std::uint64_t kLargest = (std::uint64_t{1} << 48U) - 1;  // that an event can say

}  // namespace

std::uint64_t Recorder::on_oom(std::uint64_t size, Device device, Tag tag) noexcept {
  Block request;
  request.set(std::min(size, kLargest), tag.category, tag.category);
  request.device = device;
  request.module = tag.module;
  request.thread = this_thread().thread_id();
  std::list<Failure> one;  // memory is asked for outside the lock, and given back there
  try {
    one.push_back({.requested = size,
                   .unix_ns = unix_ns(),
                   .device = device,
                   .tag = tag,
                   .holdings = holdings_of(live_blocks(), device)});
  } catch (const std::bad_alloc&) {  // on the CPU it may be the host's memory that ran out
  }
  const std::lock_guard guard(lock_);
  write(EventKind::oom, request, tag.phase, tag.op, physical_.load());
  const std::uint64_t number = failures_seen_++;
  if (!one.empty()) {
    one.front().number = number;
    one.front().step = physical_.load();
    one.front().logical_step = logical_.load();
    failures_.splice(failures_.end(), one);
    if (failures_.size() > kMaxFailures) one.splice(one.begin(), failures_, failures_.begin());
  }
  return number;
}

void Recorder::note_upstream_at_failure(std::uint64_t number,
                                        const UpstreamAtFailure& upstream) noexcept {
  const std::lock_guard guard(lock_);
  for (Failure& failure : failures_) {
    if (failure.number == number) failure.upstream = upstream;
  }
}

std::vector<Failure> Recorder::failures() {
  const std::lock_guard guard(lock_);
  return {failures_.begin(), failures_.end()};
}

}  // namespace opacus_memprof
