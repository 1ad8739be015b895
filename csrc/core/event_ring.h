// SPDX-License-Identifier: Apache-2.0
// Events on their way from the allocating threads to the thread that writes files: a ring in memory
// without a file behind it. Its pages exist from the start, and forked children do not get them
// (which would cause copies on write).
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>
#include <system_error>

#include "core/clock.h"
#include "core/event.h"

namespace opacus_memprof {

class alignas(64) EventRing {
 public:
  static constexpr std::uint64_t kEvents = std::uint64_t{1} << 20U;  // 32 MiB

  // Throws std::system_error if there is no memory.
  EventRing() {
    void* memory = ::mmap(nullptr, kEvents * sizeof(Event), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "memory for events");
    }
    ::madvise(memory, kEvents * sizeof(Event), MADV_DONTFORK);
    events_ = static_cast<Event*>(memory);
  }
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;
  ~EventRing() { ::munmap(events_, kEvents * sizeof(Event)); }

  // One writer at a time. Events are lost from the moment when the ring is full until resume(). The
  // stream has no holes except between the events read before and after such a loss.
  void append(const EventWords& words) noexcept {
    const std::uint64_t head = head_.load(std::memory_order_relaxed);
    if (head == end_ && !find_room(head)) {
      lost_.store(lost_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return;
    }
    auto* target = reinterpret_cast<std::uint64_t*>(events_ + head % kEvents);
    target[0] = words[0];
    target[1] = words[1];
    target[2] = words[2];
    target[3] = words[3];
    head_.store(head + 1, std::memory_order_release);
    // Prefetches the line after next, before the next event needs it.
    __builtin_prefetch(events_ + (head + 4) % kEvents, 1);
  }

  // The numbers of appended and of lost events.
  [[nodiscard]] std::uint64_t appended() const noexcept {
    return head_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::uint64_t lost() const noexcept {
    return lost_.load(std::memory_order_relaxed);
  }

  // The origin of event times.
  [[nodiscard]] std::uint64_t start_ticks() const noexcept { return start_ticks_; }
  void set_start_ticks(std::uint64_t start) noexcept { start_ticks_ = newest_ticks_ = start; }

  // The time of the next event, for the writer. It is later than the previous one, although a core
  // may read its clock a few instructions early.
  std::uint64_t next_time() noexcept {
    newest_ticks_ = std::max(newest_ticks_ + 1, ticks());
    return newest_ticks_ - start_ticks_;
  }
  // Does what next_time() does, with the newest reading of the clock, which may be the reader's. A
  // new reading would cost as much as the rest of an event.
  std::uint64_t next_time_unread() noexcept {
    newest_ticks_ = std::max(newest_ticks_ + 1, reading_.load(std::memory_order_relaxed));
    return newest_ticks_ - start_ticks_;
  }

  // Ends a loss; nobody appends meanwhile.
  void resume() noexcept {
    lost_before_ = lost();
    losing_.store(false, std::memory_order_release);
  }

  // --- the reader's ---
  void read_clock() noexcept { reading_.store(ticks(), std::memory_order_relaxed); }
  // The appended events that were not released yet, as far as they are contiguous.
  [[nodiscard]] std::span<const Event> readable() const noexcept {
    const std::uint64_t begin = tail_.load(std::memory_order_relaxed);
    const std::uint64_t count = std::min(appended() - begin, kEvents - begin % kEvents);
    return {events_ + begin % kEvents, static_cast<std::size_t>(count)};
  }
  void release(std::size_t events) noexcept {
    tail_.store(tail_.load(std::memory_order_relaxed) + events, std::memory_order_release);
  }
  [[nodiscard]] std::uint64_t released() const noexcept {
    return tail_.load(std::memory_order_relaxed);
  }
  // Returns whether nothing follows the readable events until resume().
  [[nodiscard]] bool is_losing() const noexcept { return losing_.load(std::memory_order_acquire); }
  // The number of events lost before the latest resume().
  [[nodiscard]] std::uint64_t lost_before() const noexcept { return lost_before_; }

 private:
  [[gnu::cold]] bool find_room(std::uint64_t head) noexcept {
    if (losing_.load(std::memory_order_relaxed)) return false;
    end_ = tail_.load(std::memory_order_acquire) + kEvents;
    if (head < end_) return true;
    losing_.store(true, std::memory_order_release);
    return false;
  }

  // The first cache line has the members that append and the times of events use.
  Event* events_ = nullptr;
  std::uint64_t start_ticks_ = 0;
  std::atomic<std::uint64_t> head_{0};
  std::uint64_t end_ = kEvents;  // no room from here on, as far as the writer knows
  std::atomic<std::uint64_t> lost_{0};
  std::uint64_t newest_ticks_ = 0;
  std::atomic<std::uint64_t> reading_{0};
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::atomic<bool> losing_{false};
  std::uint64_t lost_before_ = 0;
};

}  // namespace opacus_memprof
