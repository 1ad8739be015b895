// SPDX-License-Identifier: Apache-2.0
// The event file: fixed-width records appended to a memory-mapped file, so that a killed process
// loses nothing that was written and a write costs a store.
//
// The file's space is reserved ahead (posix_fallocate) and its pages are faulted in ahead by a
// thread of its own: a full disk then shows as a refused reservation and never as a SIGBUS, and the
// allocating thread pays no page fault.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "core/event.h"

namespace opacus_memprof {

class EventFile {
 public:
  // Creates (or empties) `path` for at most `capacity` events and reserves the first chunk.
  // `housekeeping` runs about once a second on the file's own thread.
  // Throws std::system_error where the file cannot be made or has no room for the first chunk.
  EventFile(const std::string& path, std::uint64_t capacity, std::function<void()> housekeeping);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  // Cuts the file to what was written and marks it closed.
  ~EventFile();

  // One writer at a time (the recorder's lock). Never throws, never blocks on the disk beyond a
  // reservation; an event that finds no room is counted as dropped.
  void append(const Event& event) noexcept {
    if (count_ < reserved_.load(std::memory_order_acquire) || make_room()) {
      records_[count_] = event;
      ++count_;
      std::atomic_ref(header_->count).store(count_, std::memory_order_release);
    } else {
      ++header_->dropped;
    }
  }

  [[nodiscard]] std::uint64_t start_ticks() const noexcept { return header_->start_ticks; }
  [[nodiscard]] std::uint64_t written() const noexcept { return count_; }
  [[nodiscard]] std::uint64_t dropped() const noexcept { return header_->dropped; }
  // Why the file stopped growing; empty while it has not.
  [[nodiscard]] std::string error() const;

  // In a forked child: lets go of the parent's file without touching it.
  void abandon() noexcept;

 private:
  bool make_room() noexcept;
  bool reserve(std::uint64_t events) noexcept;
  void run();
  void read_clocks() noexcept;

  std::string path_;
  std::uint64_t capacity_;
  std::uint64_t mapped_bytes_;
  int descriptor_ = -1;
  FileHeader* header_ = nullptr;
  Event* records_ = nullptr;
  std::uint64_t count_ = 0;
  std::atomic<std::uint64_t> reserved_{0};

  mutable std::mutex mutex_;  // guards the reservation, errno_ and stopping_
  std::condition_variable wake_;
  int errno_ = 0;
  bool stopping_ = false;
  std::function<void()> housekeeping_;
  std::thread thread_;
};

}  // namespace opacus_memprof
