// SPDX-License-Identifier: Apache-2.0
// Reads the events of a run in order, in chunks, from all of its pieces (docs/format.md). Files may
// be of any size and may still be written. A file that shrinks while it is read ends early, without
// a SIGBUS. A file that is removed meanwhile is read to its end.
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

  // The header of the first piece.
  [[nodiscard]] const FileHeader& header() const { return pieces_.front().header; }
  // Maximum number of records that can be read, without those of live sets.
  [[nodiscard]] std::uint64_t size() const;

  // Reads the next records; false at the end.
  bool next();
  // The records of the last call of next(); valid until the next call. They are either events,
  // including settled blocks, or, after a gap, the live set at the start of a piece.
  [[nodiscard]] std::span<const Event> records() const { return {buffer_.data(), read_}; }
  // The opening of that piece; nullptr if the records are events.
  [[nodiscard]] const Opening* opening() const { return opening_; }
  // Number of the run's events before the next one.
  [[nodiscard]] std::uint64_t position() const { return position_; }

  // Starts again. Records that were not written at the first reading are not read at the second.
  void rewind();
  // Looks for records that were written since then; next() continues with them.
  void refresh();

 private:
  struct Piece {
    std::ifstream file;
    FileHeader header{};
    std::uint64_t records = 0;
    std::uint64_t end = ~std::uint64_t{0};  // the first record that was not written
  };
  static Piece open(const std::string& path);
  void find_later_pieces();
  void measure();
  bool at_opening(const Piece& piece) const;
  std::size_t read(Piece& piece, std::uint64_t records);

  std::string path_;
  std::vector<Piece> pieces_;  // in order
  std::size_t piece_ = 0;      // the current one
  std::uint64_t place_ = 0;    // its records that were read or skipped
  std::uint64_t position_ = 0;
  const Opening* opening_ = nullptr;
  std::vector<Event> buffer_;
  std::size_t read_ = 0;
};

}  // namespace opacus_memprof
