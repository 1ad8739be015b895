// SPDX-License-Identifier: Apache-2.0
// Reads an event file in order, in pieces: neither the file's size nor a writer that is still at
// work matters, and a file that shrinks while it is read is an end and not a SIGBUS.
#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "core/event.h"

namespace opacus_memprof {

// Not thread safe.
class EventReader {
 public:
  // Throws std::runtime_error with one sentence: unreadable, truncated, not an event file, or of
  // another format version.
  explicit EventReader(const std::string& path);

  [[nodiscard]] const FileHeader& header() const { return header_; }

  // Records that can be read: the header's count, or what the file holds where that is less or the
  // writer has not ended; such a file's records end at the first without a kind.
  [[nodiscard]] std::uint64_t size() const { return size_; }

  // The next records, empty at the end; valid until the next call.
  [[nodiscard]] std::span<const Event> next();

  void rewind();

 private:
  std::ifstream file_;
  FileHeader header_{};
  std::uint64_t size_ = 0;
  std::uint64_t position_ = 0;
  std::vector<Event> buffer_;
};

}  // namespace opacus_memprof
