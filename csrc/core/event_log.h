// SPDX-License-Identifier: Apache-2.0
// The event file that is being written, if any, and its contents. Not thread safe except is_open():
// the recorder's lock guards it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/event_file.h"
#include "core/ledger.h"

namespace opacus_memprof {

class EventLog {
 public:
  struct Status {
    bool recording = false;
    std::uint64_t written = 0;
    std::uint64_t dropped = 0;
    std::string error;
  };

  EventLog() = default;
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;
  ~EventLog() { stop(); }

  [[nodiscard]] bool is_open() const noexcept { return file() != nullptr; }
  // nullptr if no file is written; for callers that prefetch it.
  [[nodiscard]] EventFile* file() const noexcept { return file_.load(std::memory_order_relaxed); }

  // Throws std::logic_error if a file is being written already.
  void start(std::unique_ptr<EventFile> file) {
    if (is_open()) {
      throw std::logic_error("events are being written already; end the running profile first");
    }
    file_ = file.release();
  }
  // Returns the file, which its owner closes outside the lock; nullptr if there was none.
  std::unique_ptr<EventFile> stop() noexcept {
    return std::unique_ptr<EventFile>(file_.exchange(nullptr));
  }
  // In a forked child: the file belongs to the parent; its thread and mutex cannot be destroyed
  // here.
  void abandon() noexcept {
    if (EventFile* file = file_.exchange(nullptr); file != nullptr) file->abandon();
  }

  [[nodiscard]] Status status() const {
    const EventFile* file = this->file();
    if (file == nullptr) return {};
    return {.recording = true,
            .written = file->written(),
            .dropped = file->dropped(),
            .error = file->error()};
  }

  // `phase`, `op` and `step` belong to the event, the other fields to the block.
  void write(EventKind kind, const Block& block, std::uint8_t phase, std::uint16_t op,
             std::uint32_t step) noexcept {
    EventFile* file = this->file();
    if (file == nullptr) return;
    // For frees, order matters; exact times do not.
    const std::uint64_t time =
        kind == EventKind::free ? file->next_time_unread() : file->next_time();
    file->append(
        {event_word(time, static_cast<std::uint8_t>(kind), block.category()),
         event_word(block.address, phase, block.device),
         event_word(block.size(), block.stream, block.thread),
         std::uint64_t{block.module} | std::uint64_t{op} << 16U | std::uint64_t{step} << 32U});
  }

 private:
  std::atomic<EventFile*> file_{nullptr};  // owned
};

}  // namespace opacus_memprof
