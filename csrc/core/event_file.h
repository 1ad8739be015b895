// SPDX-License-Identifier: Apache-2.0
// The events of a run on their way to its files. The threads that allocate put them into memory
// (EventRing); a thread of its own writes them (FlightRecorder) every few milliseconds, so that no
// allocation waits for a disk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/event.h"
#include "core/event_ring.h"
#include "core/flight_recorder.h"
#include "core/ledger.h"

namespace opacus_memprof {

class alignas(64) EventFile {
 public:
  // What is called on the file's own thread.
  struct Calls {
    std::function<void()> housekeeping;  // about once a second
    // Where events were lost for want of room: what is live now. Calls go_on() meanwhile, while
    // nobody appends. Without it nothing follows a loss.
    std::function<std::vector<Block>(EventFile&)> live_blocks;
  };

  // Makes the files of a run at `path`, for at most `capacity` records.
  // Throws std::system_error where they cannot be made or there is no room for the first ones.
  EventFile(const std::string& path, std::uint64_t capacity, Calls calls);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  // Writes what is left and marks the run closed.
  ~EventFile();

  // One writer at a time (the recorder's lock). Never throws, never blocks; an event that finds no
  // room is counted as dropped.
  void append(const EventWords& words) noexcept { ring_.append(words); }

  // The time of the next event: each is later than the one before.
  [[nodiscard]] std::uint64_t next_time() noexcept { return ring_.next_time(); }
  // Likewise, by the newest reading of the clock: that of an event, or of the file's thread, which
  // reads it every few milliseconds.
  [[nodiscard]] std::uint64_t next_time_unread() noexcept { return ring_.next_time_unread(); }

  [[nodiscard]] std::uint64_t start_ticks() const noexcept { return ring_.start_ticks(); }
  [[nodiscard]] std::uint64_t written() const noexcept { return ring_.appended(); }
  [[nodiscard]] std::uint64_t dropped() const noexcept;
  // Why the files stopped growing; empty while they have not.
  [[nodiscard]] std::string error() const;

  // Waits until the files have what has been appended.
  void flush();
  // For Calls::live_blocks.
  void go_on() noexcept { ring_.go_on(); }

  // In a forked child: lets go of the parent's files without touching them.
  void abandon() noexcept;

 private:
  void run();
  void write();
  void write_or_fail() noexcept;

  EventRing ring_;

  std::string path_;
  Calls calls_;
  FlightRecorder recorder_;    // the thread's
  std::uint64_t skipped_ = 0;  // the thread's: what the ring had lost and the recorder knows of
  bool failed_ = false;        // likewise: there was no memory to go on
  std::atomic<std::uint64_t> lost_{0};  // beyond what the ring has lost
  std::atomic<int> errno_{0};

  std::mutex mutex_;  // guards the next three; nobody who allocates takes it
  std::condition_variable wake_;
  bool stopping_ = false;
  std::uint64_t wanted_ = 0;  // that somebody waits for
  std::uint64_t done_ = 0;
  std::condition_variable flushed_;
  std::thread thread_;
};

}  // namespace opacus_memprof
