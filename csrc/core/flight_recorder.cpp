// SPDX-License-Identifier: Apache-2.0
#include "core/flight_recorder.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/clock.h"
#include "core/event_pieces.h"

namespace opacus_memprof {

namespace {

constexpr std::uint64_t kFewestEvents = 16;              // of a piece
constexpr std::uint64_t kFirstEvents = 128 * 1024;       // 4 MiB, or there is no room for a profile
constexpr std::uint64_t kPauseNs = 1'000'000'000;        // before the next attempt on a full disk
constexpr std::uint64_t kLap = std::uint64_t{1} << 48U;  // range of the events' ticks

std::uint64_t bytes_for(std::uint64_t records) { return kHeaderBytes + records * sizeof(Event); }

bool changes_bytes(const Event& event) {
  const auto kind = static_cast<EventKind>(event.kind);
  return kind == EventKind::alloc || kind == EventKind::free || kind == EventKind::seed;
}

bool by_birth(const Event& a, const Event& b) { return seed_state(a).birth < seed_state(b).birth; }

Event seed_of(const ReplayBlock& block, std::uint64_t birth) {
  Event seed{};
  seed.time = seed_word({.birth = birth & ((std::uint64_t{1} << 37U) - 1),
                         .retagged = block.retagged,
                         .captured = block.captured,
                         .seeded = block.seeded,
                         .outcome = block.outcome}) &
              (kLap - 1);
  seed.kind = static_cast<std::uint8_t>(EventKind::seed);
  seed.category = block.category;
  seed.address = block.key & (kLap - 1);
  seed.phase = block.phase;
  seed.device = block.device();
  seed.size = block.size;
  seed.stream = block.stream;
  seed.thread = block.thread;
  seed.module = block.module;
  seed.op = block.op;
  seed.step = block.step;
  return seed;
}

}  // namespace

FlightRecorder::FlightRecorder(const std::string& path, std::uint64_t capacity)
    : path_(path), capacity_(std::max<std::uint64_t>(capacity, 1)) {
  std::memcpy(header_.magic, kMagic, sizeof(kMagic));
  header_.version = kEventVersion;
  header_.record_bytes = sizeof(Event);
  header_.capacity = capacity_;
  header_.pid = static_cast<std::uint64_t>(::getpid());
  set_wall_clock();
  header_.start_ticks = header_.last_ticks = ticks();
  header_.start_unix_ns = header_.last_unix_ns = unix_ns();
  open_first();
}

FlightRecorder::~FlightRecorder() { abandon(); }

void FlightRecorder::open_first() {
  const std::uint64_t asked = capacity_;
  for (const std::string& later : later_pieces(path_)) ::unlink(later.c_str());
  first_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (first_ < 0) throw std::system_error(errno, std::generic_category(), path_);
  struct statvfs disk {};
  if (::fstatvfs(first_, &disk) == 0) {  // an eighth remains for other files
    capacity_ =
        std::min<std::uint64_t>(capacity_, disk.f_bavail * disk.f_frsize / 8 * 7 / sizeof(Event));
    header_.capacity = capacity_;
  }
  const auto room = static_cast<off_t>(bytes_for(std::min(kFirstEvents, asked)));
  int error = ::posix_fallocate(first_, 0, room);
  if (error == 0 && ::ftruncate(first_, 0) != 0) error = errno;
  if (error == 0 && !write_all(first_, &header_, sizeof(header_), 0)) error = error_;
  if (error == 0 && ::ftruncate(first_, kHeaderBytes) != 0) error = errno;
  if (error != 0) {
    ::close(first_);
    ::unlink(path_.c_str());
    throw std::system_error(error, std::generic_category(), path_);
  }
  current_ = first_;
  pieces_.emplace_back();
  most_events_ = std::max(capacity_ / kPieces, kFewestEvents);
}

void FlightRecorder::take(std::span<const Event> events) {
  while (!events.empty()) {
    if (current_ >= 0 && pieces_.back().events == most_events_) close_piece();
    const bool open = current_ >= 0 || open_next();
    const auto part = open ? events.first(static_cast<std::size_t>(std::min<std::uint64_t>(
                                 events.size(), most_events_ - pieces_.back().events)))
                           : events;
    walk_.visit(part);
    if (!open || !append(part.data(), part.size())) lost_ += part.size();
    if (open && current_ >= 0) pieces_.back().events += part.size();
    events = events.subspan(part.size());
  }
  write_settled();
}

void FlightRecorder::skip(std::uint64_t events, const std::vector<Block>& live) {
  if (current_ >= 0) close_piece();
  lost_ += events;
  const std::vector<Event> seeds = seeds_of(live);
  Opening opening = this->opening();
  opening.first_event += events;
  if (!seeds.empty()) opening.births = std::max(opening.births, seed_state(seeds.back()).birth + 1);
  walk_.resume(opening, seeds);
  write_settled();
}

// Returns the seeds of blocks that the recorder reports as live. A block that looks the same as
// before has survived.
std::vector<Event> FlightRecorder::seeds_of(const std::vector<Block>& live) {
  std::uint64_t births = walk_.births().next();
  std::vector<Event> seeds;
  seeds.reserve(live.size());
  for (const Block& now : live) {
    ReplayBlock block;
    block.key = std::uint64_t{now.device} << 48U | (now.address & (kLap - 1));
    block.captured = now.captured;
    block.seeded = now.seeded;
    block.stream = now.stream;
    block.thread = now.thread;
    block.size = now.size();
    block.category = now.category();
    block.phase = now.phase;
    block.step = now.step;
    block.module = now.module;
    block.op = now.op;
    const ReplayBlock* before = walk_.find(block.key);
    if (before != nullptr && before->size == block.size && before->step == block.step &&
        before->op == block.op && before->phase == block.phase) {
      block.captured |= before->captured;
      block.retagged = before->retagged || before->category != block.category;
      block.outcome = before->outcome;
      seeds.push_back(seed_of(block, walk_.births().in_run(before->birth)));
    } else {
      seeds.push_back(seed_of(block, births++));
    }
  }
  std::ranges::sort(seeds, by_birth);
  return seeds;
}

std::vector<Event> FlightRecorder::live_set() const {
  std::vector<Event> seeds;
  walk_.table().for_each([&](const ReplayBlock& block) {
    seeds.push_back(seed_of(block, walk_.births().in_run(block.birth)));
  });
  std::ranges::sort(seeds, by_birth);
  return seeds;
}

Opening FlightRecorder::opening() const {
  Opening opening{};
  opening.piece = number_;
  opening.first_event = walk_.events();
  opening.births = walk_.births().next();
  opening.ticks = ticks_;
  opening.logical_step = logical_step_;
  rules_.write(opening, walk_.births());
  return opening;
}

bool FlightRecorder::open_next() {
  const std::uint64_t now = unix_ns();
  if (tried_ns_ != 0 && now - tried_ns_ < kPauseNs) return false;
  const std::vector<Event> seeds = live_set();
  FileHeader header = header_;
  header.opening = opening();
  header.opening.seeds = seeds.size();
  const std::string path = piece_path(path_, number_);
  current_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  bool written = current_ >= 0;
  if (!written) {
    error_ = errno;
  } else {
    Piece& piece = pieces_.emplace_back();
    piece.number = number_;
    piece.records = seeds.size();
    std::array<char, kHeaderBytes> page{};
    std::memcpy(page.data(), &header, sizeof(header));
    written = write_all(current_, page.data(), page.size(), 0) &&
              write_all(current_, seeds.data(), seeds.size() * sizeof(Event), kHeaderBytes);
    if (!written) {
      ::close(std::exchange(current_, -1));
      ::unlink(path.c_str());
      pieces_.pop_back();
    }
  }
  if (!written) {
    tried_ns_ = now;
    return false;
  }
  tried_ns_ = 0;
  most_events_ = std::max({capacity_ / kPieces, 2 * header.opening.seeds, kFewestEvents});
  keep_bound();
  return true;
}

void FlightRecorder::close_piece() {
  pieces_.back().births = walk_.births().count();
  const int descriptor = std::exchange(current_, -1);
  if (descriptor != first_) ::close(descriptor);
  ++number_;
}

// Appends to the current piece. Returns false if not all records find room: the piece ends without
// them.
bool FlightRecorder::append(const void* records, std::uint64_t count) {
  const std::uint64_t end = bytes_for(pieces_.back().records);
  if (write_all(current_, records, count * sizeof(Event), end)) {
    pieces_.back().records += count;
    return true;
  }
  [[maybe_unused]] const int cut = ::ftruncate(current_, static_cast<off_t>(end));
  close_piece();
  return false;
}

// Removes removable pieces if the disk is full.
bool FlightRecorder::write_all(int descriptor, const void* data, std::uint64_t bytes,
                               std::uint64_t offset) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(descriptor, at, bytes, static_cast<off_t>(offset));
    if (written > 0) {
      at += written;
      bytes -= static_cast<std::uint64_t>(written);
      offset += static_cast<std::uint64_t>(written);
    } else if (errno != EINTR) {
      error_ = errno;
      const bool full = errno == ENOSPC || errno == EDQUOT;
      if (!full || !remove_oldest()) return false;
    }
  }
  return true;
}

// A piece stays if it contains the beginning or a peak.
bool FlightRecorder::stays(std::uint64_t piece) const {
  return piece == 0 || std::ranges::any_of(peaks_, [=](const Peak& peak) {
           return peak.highest > 0 &&
                  (peak.piece == piece || (!peak.open && peak.end_piece == piece));
         });
}

// Removes the oldest removable piece before the current one. Its information about blocks in other
// pieces is written first.
bool FlightRecorder::remove_oldest() {
  write_settled();
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    if (stays(piece->number) || piece->number == number_) continue;
    ::unlink(piece_path(path_, piece->number).c_str());
    pieces_.erase(piece);
    return true;
  }
  return false;
}

void FlightRecorder::keep_bound() {
  const auto records = [this] {
    std::uint64_t sum = most_events_;  // of the newest pieces, in the end
    for (const Piece& piece : pieces_) sum += piece.records;
    return sum;
  };
  const auto newest_before = pieces_.size() < 2 ? 0 : pieces_[pieces_.size() - 2].number;
  while (records() > capacity_) {
    const auto oldest =
        std::ranges::find_if(pieces_, [this](const Piece& piece) { return !stays(piece.number); });
    if (oldest == pieces_.end() || oldest->number >= newest_before || !remove_oldest()) return;
  }
}

void FlightRecorder::write_settled() {
  for (Piece& piece : pieces_) {
    if (piece.settled.empty()) continue;
    const std::vector<Event> settled = std::exchange(piece.settled, {});
    const int descriptor = ::open(piece_path(path_, piece.number).c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor < 0) continue;
    const std::uint64_t bytes = settled.size() * sizeof(Event);
    std::uint64_t done = 0;
    while (done < bytes) {
      const ssize_t written =
          ::pwrite(descriptor, reinterpret_cast<const char*>(settled.data()) + done, bytes - done,
                   static_cast<off_t>(bytes_for(piece.records) + done));
      if (written <= 0) break;
      done += static_cast<std::uint64_t>(written);
    }
    piece.records += done / sizeof(Event);
    ::close(descriptor);
  }
}

void FlightRecorder::write_header(bool closed) {
  header_.count = walk_.events();
  header_.dropped = lost_;
  header_.last_ticks = ticks();
  header_.last_unix_ns = unix_ns();
  header_.closed = closed ? 1 : 0;
  [[maybe_unused]] const ssize_t written = ::pwrite(first_, &header_, sizeof(header_), 0);
}

void FlightRecorder::remove() {
  abandon();
  ::unlink(path_.c_str());
}

void FlightRecorder::abandon() {
  if (current_ >= 0 && current_ != first_) ::close(current_);
  if (first_ >= 0) ::close(first_);
  current_ = first_ = -1;
}

void FlightRecorder::before(const Event& event, const ReplayTable& /*table*/) {
  if (event.time < ticks_ % kLap && ticks_ % kLap - event.time > kLap / 2) ticks_ += kLap;
  ticks_ = ticks_ / kLap * kLap + event.time;
  if (static_cast<EventKind>(event.kind) == EventKind::retag) {
    const ReplayBlock* block = walk_.find(ReplayTable::key(event));
    had_module_ = block != nullptr && block->module != 0;
  }
  if (!changes_bytes(event)) return;
  Peak& peak = peaks_[event.device];
  if (std::exchange(peak.open, false)) peak.end_piece = number_;
}

void FlightRecorder::born(const ReplayBlock& block) {
  Peak& peak = peaks_[block.device()];
  peak.bytes += static_cast<std::int64_t>(block.size);
  if (peak.bytes > peak.highest) {
    peak.highest = peak.bytes;
    peak.piece = number_;
    peak.open = true;
  }
}

void FlightRecorder::died(ReplayBlock& block, const Event& event) {
  peaks_[block.device()].bytes -= static_cast<std::int64_t>(block.size);
  const auto before = static_cast<std::uint8_t>(block.outcome);
  rules_.died(block, event);
  if (block.outcome != before) remember_outcome(block);
}

void FlightRecorder::retagged(ReplayBlock& block, std::uint8_t category_before) {
  const auto before = static_cast<std::uint8_t>(block.outcome);
  OutcomeRules::retagged(block, category_before);
  if (block.outcome != before || (!had_module_ && block.module != 0)) remember_outcome(block);
}

void FlightRecorder::after(const Event& event, std::uint64_t /*index*/) {
  rules_.after(event, walk_.births().count());
  if (static_cast<EventKind>(event.kind) == EventKind::step) logical_step_ = event.size;
}

// Remembers it for the pieces that stay and at whose ends the block was live.
void FlightRecorder::remember_outcome(const ReplayBlock& block) {
  for (Piece& piece : pieces_) {
    if (piece.number >= number_ || block.birth >= piece.births || !stays(piece.number)) continue;
    Event settled{};
    settled.kind = static_cast<std::uint8_t>(EventKind::settled);
    settled.category = block.outcome;
    settled.address = block.key & (kLap - 1);
    settled.device = block.device();
    settled.module = block.module;
    piece.settled.push_back(settled);
  }
}

}  // namespace opacus_memprof
