// SPDX-License-Identifier: Apache-2.0
#include "core/event_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <ranges>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "core/event_pieces.h"

namespace opacus_memprof {
namespace {

static_assert(std::endian::native == std::endian::little, "event files are little endian");

constexpr std::size_t kChunkRecords = 16384;  // 512 KiB: stays in the second-level cache
std::uint64_t bytes_of(std::ifstream& file) {
  file.clear();
  file.seekg(0, std::ios::end);
  const auto end = file.tellg();
  return end < 0 ? 0 : static_cast<std::uint64_t>(end);
}

bool is_settled(const Event& event) {
  return static_cast<EventKind>(event.kind) == EventKind::settled;
}
bool is_unwritten(const Event& event) {
  return static_cast<EventKind>(event.kind) == EventKind::none;
}

}  // namespace

EventReader::Piece EventReader::open(const std::string& path) {
  // Opening a FIFO would wait for its writer, and a device has no end.
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    throw std::runtime_error(path + " is not a regular file.");
  }
  Piece piece{.file = std::ifstream(path, std::ios::binary)};
  if (!piece.file) {
    throw std::runtime_error("cannot open " + path + ": no such file, or no permission.");
  }
  FileHeader& header = piece.header;
  const std::uint64_t bytes = bytes_of(piece.file);
  piece.file.seekg(0);
  if (!piece.file.read(reinterpret_cast<char*>(&header), sizeof(header)) || bytes < kHeaderBytes) {
    throw std::runtime_error(path + " is truncated: it has " + std::to_string(bytes) +
                             " bytes, and the header alone takes " + std::to_string(kHeaderBytes) +
                             ".");
  }
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    throw std::runtime_error(path + " is not an event file of opacus-memprof.");
  }
  if (header.version == 0 || header.version > kEventVersion ||
      header.record_bytes != sizeof(Event)) {
    throw std::runtime_error(
        path + " has format version " + std::to_string(header.version) + " with records of " +
        std::to_string(header.record_bytes) + " bytes; this release reads up to version " +
        std::to_string(kEventVersion) + " with " + std::to_string(sizeof(Event)) +
        ": read it with the release that wrote it.");
  }
  if (header.version == kWholeFileVersion) header.opening = {};
  return piece;
}

EventReader::EventReader(const std::string& path) : path_(path) {
  pieces_.push_back(open(path));
  pieces_.front().header.opening = {};
  find_later_pieces();
  measure();
}

void EventReader::refresh() {
  FileHeader now{};
  std::ifstream& file = pieces_.front().file;
  file.clear();
  file.seekg(0);
  if (file.read(reinterpret_cast<char*>(&now), sizeof(now))) {
    now.opening = {};
    pieces_.front().header = now;
  }
  find_later_pieces();
  measure();
}

// Pieces of the same run after the known ones.
void EventReader::find_later_pieces() {
  if (header().version == kWholeFileVersion) return;
  std::vector<Piece> found;
  for (const std::string& path : later_pieces(path_)) {
    try {
      Piece piece = open(path);
      if (piece.header.pid == header().pid && piece.header.start_ticks == header().start_ticks &&
          piece.header.opening.piece > pieces_.back().header.opening.piece) {
        found.push_back(std::move(piece));
      }
    } catch (const std::runtime_error&) {
      // It was removed meanwhile, or is not written yet.
    }
  }
  std::ranges::sort(found, {}, [](const Piece& piece) { return piece.header.opening.piece; });
  opening_ = nullptr;
  std::ranges::move(found, std::back_inserter(pieces_));
}

// The newest first: once a piece exists, earlier pieces do not grow any more.
void EventReader::measure() {
  for (Piece& piece : std::views::reverse(pieces_)) {
    const std::uint64_t bytes = bytes_of(piece.file);
    piece.end = ~std::uint64_t{0};
    piece.records = bytes < kHeaderBytes ? 0 : (bytes - kHeaderBytes) / sizeof(Event);
    if (piece.header.version == kWholeFileVersion && piece.header.closed != 0) {
      piece.records = std::min(piece.records, piece.header.count);
    }
  }
}

std::uint64_t EventReader::size() const {
  std::uint64_t records = 0;
  for (const Piece& piece : pieces_) {
    records += piece.records - std::min(piece.records, piece.header.opening.seeds);
  }
  return records;
}

bool EventReader::next() {
  opening_ = nullptr;
  read_ = 0;
  for (;; ++piece_, place_ = 0) {
    Piece& piece = pieces_[piece_];
    const Opening& opening = piece.header.opening;
    const bool last = piece_ + 1 == pieces_.size();
    if (place_ == 0 && piece_ > 0) {
      // Its opening was not written completely, or the file is a copy.
      if (piece.records < opening.seeds || opening.first_event < position_) {
        if (last) return false;
        continue;
      }
      if (opening.first_event > position_) {
        read_ = read(piece, opening.seeds);
        position_ = opening.first_event;
        opening_ = &opening;
        return true;
      }
      place_ = opening.seeds;
    }
    read_ = read(piece, std::min<std::uint64_t>(piece.records - place_, kChunkRecords));
    position_ += read_ - static_cast<std::uint64_t>(std::ranges::count_if(records(), is_settled));
    if (read_ > 0) return true;
    if (last) return false;
  }
}

// Reads the next records of the piece, up to one that was never written. The buffer grows with the
// existing records, not with the number in a header.
std::size_t EventReader::read(Piece& piece, std::uint64_t records) {
  records = std::min(records, piece.end - place_);
  piece.file.clear();
  piece.file.seekg(static_cast<std::streamoff>(kHeaderBytes + place_ * sizeof(Event)));
  std::size_t written = 0;
  while (written < records) {
    const auto wanted =
        static_cast<std::size_t>(std::min<std::uint64_t>(records - written, kChunkRecords));
    if (buffer_.size() < written + wanted) buffer_.resize(written + wanted);
    const auto chunk = std::span(buffer_).subspan(written, wanted);
    piece.file.read(reinterpret_cast<char*>(chunk.data()),
                    static_cast<std::streamsize>(chunk.size_bytes()));
    const auto found = chunk.first(static_cast<std::size_t>(piece.file.gcount()) / sizeof(Event));
    const auto last = std::ranges::find_if(found, is_unwritten);
    written += static_cast<std::size_t>(last - found.begin());
    if (last != found.end() || found.size() < wanted) break;
  }
  place_ += written;
  if (written < records) piece.end = place_;
  return written;
}

void EventReader::rewind() {
  piece_ = 0;
  place_ = position_ = 0;
  opening_ = nullptr;
  read_ = 0;
}

}  // namespace opacus_memprof
