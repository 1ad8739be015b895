// SPDX-License-Identifier: Apache-2.0
// Reads the events of a run in order, in chunks, from all of its pieces (docs/format.md): neither
// their size nor a writer that is still at work matters, and a file that shrinks while it is read
// is an end and not a SIGBUS. A file that is removed meanwhile is read to its end.
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

  // Of the first piece.
  [[nodiscard]] const FileHeader& header() const { return pieces_.front().header; }
  // Records that can be read, at most; those of live sets are left out.
  [[nodiscard]] std::uint64_t size() const;

  // Reads on; false at the end.
  bool next();
  // What the last call of next() has read; valid until the next call. Either events, among them
  // settled blocks, or after a gap the live set with which a piece opens.
  [[nodiscard]] std::span<const Event> records() const { return {buffer_.data(), read_}; }
  // Of that piece; nullptr where the records are events.
  [[nodiscard]] const Opening* opening() const { return opening_; }
  // How many events of the run there were before the one that comes next.
  [[nodiscard]] std::uint64_t position() const { return position_; }

  // Starts again. What was not written at the first reading is not read at the second.
  void rewind();
  // Looks for what was written since; next() reads on there.
  void refresh();

 private:
  struct Piece {
    std::ifstream file;
    FileHeader header{};
    std::uint64_t records = 0;
    std::uint64_t end = ~std::uint64_t{0};  // the record that was found not to be written
  };
  static Piece open(const std::string& path);
  void find_later_pieces();
  void measure();
  bool at_opening(const Piece& piece) const;
  std::size_t read(Piece& piece, std::uint64_t records);

  std::string path_;
  std::vector<Piece> pieces_;  // in order
  std::size_t piece_ = 0;      // the one that is read
  std::uint64_t place_ = 0;    // records of it that were read or left out
  std::uint64_t position_ = 0;
  const Opening* opening_ = nullptr;
  std::vector<Event> buffer_;
  std::size_t read_ = 0;
};

}  // namespace opacus_memprof
