// SPDX-License-Identifier: Apache-2.0
// Writes a run's events to pieces (docs/format.md), and removes pieces that exceed the limit. The
// beginning, the peak of each device and the newest pieces stay.
//
// It follows the events as a reader does. It therefore knows the live set at the start of a piece,
// and the outcomes of blocks after the end of a piece that stays.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/event.h"
#include "core/event_walk.h"
#include "core/ledger.h"
#include "core/replay_outcomes.h"

namespace opacus_memprof {

// Not thread safe.
class FlightRecorder {
 public:
  static constexpr std::uint64_t kPieces = 16;  // number of pieces into which the limit is divided

  // Makes the first piece at `path`, for at most `capacity` records in all pieces, and removes the
  // pieces of an earlier run. Throws std::system_error if it cannot be made or there is no room for
  // it.
  FlightRecorder(const std::string& path, std::uint64_t capacity);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;
  ~FlightRecorder();

  [[nodiscard]] const FileHeader& header() const { return header_; }

  // The next events.
  void take(std::span<const Event> events);
  // The next `events` are lost; afterwards these blocks are live.
  void skip(std::uint64_t events, const std::vector<Block>& live);
  // Number of events that are in no piece, including skipped ones.
  [[nodiscard]] std::uint64_t lost() const { return lost_; }
  // The reason why the files last stopped growing: an errno, or 0.
  [[nodiscard]] int error() const { return error_; }

  // Updates the run's data in the first piece's header.
  void write_header(bool closed);
  // Removes the first piece again.
  void remove();
  // In a forked child: releases the parent's files without touching them.
  void abandon();

  // The visitor's part of EventWalk.
  void before(const Event& event, const ReplayTable&);
  void born(const ReplayBlock& block);
  void died(ReplayBlock& block, const Event& event);
  void retagged(ReplayBlock& block, std::uint8_t before);
  void after(const Event& event, std::uint64_t index);
  void gap(const EventGap&, const ReplayTable&) {}
  void outcome_known(const ReplayBlock&, std::uint16_t) {}
  void resumed(const Opening&, const Births&) {}

 private:
  struct Piece {
    std::uint64_t number = 0;
    std::uint64_t records = 0;
    std::uint64_t events = 0;
    std::uint64_t births = 0;    // before its end
    std::vector<Event> settled;  // still to be written
  };
  // The highest bytes of a device: the first piece with them, and the piece in which they change
  // next.
  struct Peak {
    std::int64_t bytes = 0;
    std::int64_t highest = 0;
    std::uint64_t piece = 0;
    std::uint64_t end_piece = 0;
    bool open = false;  // whether they have not changed since then
  };

  void open_first();
  bool open_next();
  void close_piece();
  bool append(const void* records, std::uint64_t count);
  bool write_all(int descriptor, const void* data, std::uint64_t bytes, std::uint64_t offset);
  void write_settled();
  void remember_outcome(const ReplayBlock& block);
  bool remove_oldest();
  void keep_bound();
  [[nodiscard]] bool stays(std::uint64_t piece) const;
  [[nodiscard]] Opening opening() const;
  [[nodiscard]] std::vector<Event> live_set() const;
  [[nodiscard]] std::vector<Event> seeds_of(const std::vector<Block>& live);

  std::string path_;
  std::uint64_t capacity_;
  FileHeader header_{};
  int first_ = -1;                 // descriptors of the first piece and of the current one
  int current_ = -1;               // -1: none
  std::vector<Piece> pieces_;      // in order
  std::uint64_t number_ = 0;       // of the current piece, or of the next one
  std::uint64_t most_events_ = 0;  // of the current piece
  std::uint64_t lost_ = 0;
  int error_ = 0;
  std::uint64_t tried_ns_ = 0;  // when there was last no room for a piece
  std::uint64_t ticks_ = 0;     // of the newest event, since the start
  std::uint64_t logical_step_ = 0;
  bool had_module_ = false;  // of the block that the event retags

  EventWalk<FlightRecorder> walk_{*this};
  OutcomeRules rules_;
  std::array<Peak, 256> peaks_{};  // by device
};

}  // namespace opacus_memprof
