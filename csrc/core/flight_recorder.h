// SPDX-License-Identifier: Apache-2.0
// Writes a run's events to pieces (docs/format.md), and removes those that the bound has no room
// for: what stays is the beginning, the peak of each device and the newest.
//
// It follows the events as a reader does: so it knows the live set with which a piece opens, and
// what blocks turn out to be after the end of a piece that stays.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/event.h"
#include "core/event_walk.h"
#include "core/ledger.h"
#include "core/replay_fates.h"

namespace opacus_memprof {

// Not thread safe.
class FlightRecorder {
 public:
  static constexpr std::uint64_t kPieces = 16;  // that the bound is divided into

  // Makes the first piece at `path`, for at most `capacity` records in all pieces; those of a run
  // before go. Throws std::system_error where it cannot be made or there is no room for it.
  FlightRecorder(const std::string& path, std::uint64_t capacity);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;
  ~FlightRecorder();

  [[nodiscard]] const FileHeader& header() const { return header_; }

  // The next events.
  void take(std::span<const Event> events);
  // The next `events` are lost; afterwards these blocks are live.
  void skip(std::uint64_t events, const std::vector<Block>& live);
  // Events of which no piece has anything, with those that were skipped.
  [[nodiscard]] std::uint64_t lost() const { return lost_; }
  // Why the files stopped growing when they last did: an errno, or 0.
  [[nodiscard]] int error() const { return error_; }

  // Renews what the first piece's header says of the run.
  void write_header(bool closed);
  // Takes back that the first piece was made.
  void remove();
  // In a forked child: lets go of the parent's files without touching them.
  void abandon();

  // The visitor's part of EventWalk.
  void before(const Event& event, const ReplayTable&);
  void born(const ReplayBlock& block);
  void died(ReplayBlock& block, const Event& event);
  void retagged(ReplayBlock& block, std::uint8_t before);
  void after(const Event& event, std::uint64_t index);
  void gap(const EventGap&, const ReplayTable&) {}
  void fate_known(const ReplayBlock&, std::uint16_t) {}
  void resumed(const Opening&, const Births&) {}

 private:
  struct Piece {
    std::uint64_t number = 0;
    std::uint64_t records = 0;
    std::uint64_t events = 0;
    std::uint64_t births = 0;    // before its end
    std::vector<Event> settled;  // that are to be written
  };
  // The highest bytes of a device: the first piece with them, and that in which they change next.
  struct Peak {
    std::int64_t bytes = 0;
    std::int64_t highest = 0;
    std::uint64_t piece = 0;
    std::uint64_t end_piece = 0;
    bool open = false;  // they have not changed since
  };

  void open_first();
  bool open_next();
  void close_piece();
  bool append(const void* records, std::uint64_t count);
  bool write_all(int descriptor, const void* data, std::uint64_t bytes, std::uint64_t offset);
  void write_settled();
  void remember_fate(const ReplayBlock& block);
  bool remove_oldest();
  void keep_bound();
  [[nodiscard]] bool stays(std::uint64_t piece) const;
  [[nodiscard]] Opening opening() const;
  [[nodiscard]] std::vector<Event> live_set() const;
  [[nodiscard]] std::vector<Event> seeds_of(const std::vector<Block>& live);

  std::string path_;
  std::uint64_t capacity_;
  FileHeader header_{};
  int first_ = -1;             // descriptors: of the first piece, and of the one that is written
  int current_ = -1;           // -1: none is
  std::vector<Piece> pieces_;  // in order
  std::uint64_t number_ = 0;   // of the piece that is written, or that comes next
  std::uint64_t most_events_ = 0;  // of it
  std::uint64_t lost_ = 0;
  int error_ = 0;
  std::uint64_t tried_ns_ = 0;  // when there was last no room for a piece
  std::uint64_t ticks_ = 0;     // of the newest event, since the start
  std::uint64_t logical_step_ = 0;
  bool had_module_ = false;  // the block that the event retags

  EventWalk<FlightRecorder> walk_{*this};
  FateRules rules_;
  std::array<Peak, 256> peaks_{};  // by device
};

}  // namespace opacus_memprof
