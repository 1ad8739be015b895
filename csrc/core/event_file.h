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

class alignas(64) EventFile {
 public:
  // Creates (or empties) `path` for at most `capacity` events and reserves the first chunk.
  // `housekeeping` runs about once a second on the file's own thread.
  // Throws std::system_error where the file cannot be made, is beyond what can be mapped or has no
  // room for the first chunk.
  EventFile(const std::string& path, std::uint64_t capacity, std::function<void()> housekeeping);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  // Cuts the file to what was written and marks it closed.
  ~EventFile();

  // One writer at a time (the recorder's lock). Never throws, never blocks on the disk beyond a
  // reservation; an event that finds no room is counted as dropped.
  void append(const EventWords& words) noexcept {
    Event* record = next_;
    if (record >= end_.load(std::memory_order_relaxed) && !make_room()) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    next_ = record + 1;
    // The word that holds `kind` goes last: whoever reads a killed process' file stops at a record
    // without a kind, and never sees half of one.
    auto* target = reinterpret_cast<std::uint64_t*>(record);
    target[1] = words[1];
    target[2] = words[2];
    target[3] = words[3];
    std::atomic_ref(target[0]).store(words[0], std::memory_order_release);
    __builtin_prefetch(record + 4, 1);  // the line after next, before the next event needs it
  }

  [[nodiscard]] std::uint64_t start_ticks() const noexcept { return start_ticks_; }
  [[nodiscard]] std::uint64_t written() const noexcept {
    return static_cast<std::uint64_t>(next_ - records_);
  }
  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }
  // Why the file stopped growing; empty while it has not.
  [[nodiscard]] std::string error() const;

  // In a forked child: lets go of the parent's file without touching it.
  void abandon() noexcept;

 private:
  bool make_room() noexcept;
  bool reserve(std::uint64_t events) noexcept;
  void populate(std::uint64_t reserved) noexcept;
  void run();
  void refresh_header() noexcept;

  // What append touches, on the object's first line (Recorder::prefetch).
  Event* next_ = nullptr;
  std::atomic<Event*> end_{nullptr};  // of the reserved space
  std::uint64_t start_ticks_ = 0;
  std::atomic<std::uint64_t> dropped_{0};
  Event* records_ = nullptr;

  std::string path_;
  std::uint64_t capacity_;
  std::uint64_t mapped_bytes_;
  int descriptor_ = -1;
  FileHeader* header_ = nullptr;
  std::uint64_t reserved_ = 0;   // events
  std::uint64_t populated_ = 0;  // events; the file's own thread's, once it runs

  mutable std::mutex mutex_;  // guards the reservation, errno_ and stopping_
  std::condition_variable wake_;
  int errno_ = 0;
  bool stopping_ = false;
  std::function<void()> housekeeping_;
  std::thread thread_;
};

}  // namespace opacus_memprof
