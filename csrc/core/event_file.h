// SPDX-License-Identifier: Apache-2.0
// The events of a run on their way to its files. The allocating threads put them into memory
// (EventRing). A separate thread writes them (FlightRecorder) every few milliseconds, so that no
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
  // Functions that are called on the file's own thread.
  struct Calls {
    std::function<void()> housekeeping;  // about once a second
    // Returns the live blocks after events were lost because of a full ring. Calls resume()
    // meanwhile, while nobody appends. Without this function nothing is recorded after a loss.
    std::function<std::vector<Block>(EventFile&)> live_blocks;
  };

  // Makes the files of a run at `path`, for at most `capacity` records. Throws std::system_error if
  // they cannot be made or there is no room for the first ones.
  EventFile(const std::string& path, std::uint64_t capacity, Calls calls);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  // Writes the remaining events and marks the run closed.
  ~EventFile();

  // One writer at a time (the recorder's lock). Never throws, never blocks; an event that finds no
  // room is counted as dropped.
  void append(const EventWords& words) noexcept { ring_.append(words); }

  // The time of the next event, later than all previous ones.
  [[nodiscard]] std::uint64_t next_time() noexcept { return ring_.next_time(); }
  // Does the same with the newest reading of the clock, by an event or by the file's thread, which
  // reads it every few milliseconds.
  [[nodiscard]] std::uint64_t next_time_unread() noexcept { return ring_.next_time_unread(); }

  [[nodiscard]] std::uint64_t start_ticks() const noexcept { return ring_.start_ticks(); }
  [[nodiscard]] std::uint64_t written() const noexcept { return ring_.appended(); }
  [[nodiscard]] std::uint64_t dropped() const noexcept;
  // The reason why the files stopped growing; empty while they grow.
  [[nodiscard]] std::string error() const;

  // Waits until all appended events are in the files.
  void flush();
  // For Calls::live_blocks.
  void resume() noexcept { ring_.resume(); }

  // In a forked child: releases the parent's files without touching them.
  void abandon() noexcept;

 private:
  void run();
  void write();
  void write_or_fail() noexcept;

  EventRing ring_;

  std::string path_;
  Calls calls_;
  FlightRecorder recorder_;             // the thread's
  std::uint64_t skipped_ = 0;           // of the thread: losses of the ring that the recorder knows
  bool failed_ = false;                 // of the thread: there was no memory to continue
  std::atomic<std::uint64_t> lost_{0};  // in addition to losses of the ring
  std::atomic<int> errno_{0};

  std::mutex mutex_;  // guards the next three; no allocating thread takes it
  std::condition_variable wake_;
  bool stopping_ = false;
  std::uint64_t wanted_ = 0;  // requested by a waiting thread
  std::uint64_t done_ = 0;
  std::condition_variable flushed_;
  std::thread thread_;
};

}  // namespace opacus_memprof
