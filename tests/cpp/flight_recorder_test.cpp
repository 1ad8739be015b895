// SPDX-License-Identifier: Apache-2.0
// Random runs in tiny bounds, against the same events in one whole file and against a naive account
// of the bytes.
#include "core/flight_recorder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/event_file.h"
#include "core/event_pieces.h"
#include "core/event_rows.h"
#include "core/replay.h"
#include "event_file_builder.h"
#include "random_run.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using testing::RandomRun;
using testing::scratch;
using enum EventKind;

// The same events as one file of version 1: what an unbounded run knows.
ReplayResult whole(const std::vector<Event>& events, const FileHeader& header) {
  EventFileBuilder file;
  file.events = events;
  file.header = header;
  file.header.version = kWholeFileVersion;
  file.header.count = events.size();
  file.header.dropped = 0;
  file.header.opening = {};
  return replay(file.write());
}

std::string text(const ReplayResult::Moment& moment) {
  std::string result = std::to_string(moment.event) + " at " + std::to_string(moment.time_ns) +
                       ": " + std::to_string(moment.bytes) + " in step " +
                       std::to_string(moment.step) + "/" + std::to_string(moment.logical_step) +
                       " phase " + std::to_string(moment.phase) + ":";
  for (std::size_t id = 0; id < moment.categories.size(); ++id) {
    if (moment.categories[id] == 0) continue;
    result += " " + std::to_string(id) + "=" + std::to_string(moment.categories[id]);
  }
  return result;
}

std::string text(const std::vector<ReplayResult::Share>& shares) {
  std::string result;
  for (const auto& share : shares) {
    for (std::size_t id = 0; id < share.categories.size(); ++id) {
      if (share.categories[id] == 0) continue;
      result += " " + std::to_string(share.id) + "." + std::to_string(id) + "=" +
                std::to_string(share.categories[id]);
    }
  }
  return result;
}

std::string text(const std::vector<ReplayResult::LiveBlock>& blocks) {
  std::string result;
  for (const auto& block : blocks) {
    result += " " + std::to_string(block.bytes) + "/" + std::to_string(block.category) + "/" +
              std::to_string(block.module) + "/" + std::to_string(block.op) + "/" +
              std::to_string(block.step) + "/" + std::to_string(block.phase);
  }
  return result;
}

struct Naive {  // of one device
  std::int64_t bytes = 0;
  std::int64_t highest = 0;
  std::uint64_t event = 0;
};

void expect_the_same(const ReplayResult& kept, const ReplayResult& all,
                     const std::vector<Event>& events) {
  EXPECT_EQ(kept.contradictions.unknown_frees + kept.contradictions.unknown_retags +
                kept.contradictions.double_allocations + kept.contradictions.category_mismatches +
                kept.contradictions.unreadable,
            0U);
  std::uint64_t missing = 0;
  for (const auto& gap : kept.gaps) missing += gap.events;
  EXPECT_EQ(kept.events + missing, events.size());
  std::vector<std::uint32_t> ended(events.size() + 1);  // steps before each event
  for (std::size_t i = 0; i < events.size(); ++i) {
    ended[i + 1] = ended[i] + (static_cast<EventKind>(events[i].kind) == step ? 1 : 0);
  }
  for (const auto& gap : kept.gaps) {
    EXPECT_EQ(gap.step, ended[gap.first_event]);
    const std::uint64_t end = gap.first_event + gap.events;
    if (end < events.size()) {
      EXPECT_EQ(gap.end_step, ended[end]);
    }
  }

  std::map<std::uint8_t, Naive> naive;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto kind = static_cast<EventKind>(events[i].kind);
    if (kind != alloc && kind != seed && kind != EventKind::free) continue;
    Naive& device = naive[events[i].device];
    const auto size = static_cast<std::int64_t>(events[i].size);
    device.bytes += kind == EventKind::free ? -size : size;
    if (device.bytes > device.highest) device = {device.bytes, device.bytes, i};
  }
  const std::uint64_t newest =
      kept.gaps.empty() ? 0 : kept.gaps.back().first_event + kept.gaps.back().events;
  ASSERT_EQ(kept.devices.size(), all.devices.size());
  for (std::size_t i = 0; i < kept.devices.size(); ++i) {
    const auto& mine = kept.devices[i];
    const auto& theirs = all.devices[i];
    if (naive.contains(mine.id)) {
      EXPECT_EQ(mine.peak.bytes, naive[mine.id].highest);
      EXPECT_EQ(mine.peak.event, naive[mine.id].event);
      EXPECT_EQ(mine.end_bytes, naive[mine.id].bytes);
    }
    EXPECT_EQ(text(mine.peak), text(theirs.peak));
    EXPECT_EQ(text(mine.modules), text(theirs.modules));
    EXPECT_EQ(text(mine.ops), text(theirs.ops));
    EXPECT_EQ(text(mine.streams), text(theirs.streams));
    EXPECT_EQ(text(mine.threads), text(theirs.threads));
    EXPECT_EQ(text(mine.largest_blocks), text(theirs.largest_blocks));
    EXPECT_EQ(text(mine.newest_blocks), text(theirs.newest_blocks));
    EXPECT_EQ(mine.born_in, theirs.born_in);
    const bool end_is_missing =
        std::any_of(kept.gaps.begin(), kept.gaps.end(), [&](const ReplayResult::Gap& gap) {
          return theirs.last_step_end.event >= gap.first_event &&
                 theirs.last_step_end.event < gap.first_event + gap.events;
        });
    if (!end_is_missing) {
      EXPECT_EQ(text(mine.last_step_end), text(theirs.last_step_end));
    }

    std::map<std::uint32_t, const ReplayResult::Step*> steps;
    for (const auto& step : theirs.steps) steps[step.number] = &step;
    std::size_t compared = 0;
    for (const auto& step : mine.steps) {
      // Whole ones, wherever they are, and the last.
      if (!step.complete &&
          (&step != &mine.steps.back() || step.peak.event < newest || !kept.gaps.empty())) {
        continue;
      }
      ASSERT_TRUE(steps.contains(step.number));
      EXPECT_EQ(step.end_bytes, steps[step.number]->end_bytes);
      EXPECT_EQ(step.complete, steps[step.number]->complete);
      EXPECT_EQ(text(step.peak), text(steps[step.number]->peak));
      ++compared;
    }
    if (kept.gaps.empty()) {
      EXPECT_EQ(compared, theirs.steps.size());
    }
    for (const auto& snapshot : mine.snapshots) {
      const auto same = std::find_if(theirs.snapshots.begin(), theirs.snapshots.end(),
                                     [&](const auto& s) { return s.number == snapshot.number; });
      ASSERT_NE(same, theirs.snapshots.end());
      EXPECT_EQ(text(snapshot), text(*same));
    }
  }
}

// The rows add up to what replay() says, gaps or not.
void expect_rows_to_add_up(const std::string& path, const ReplayResult& result) {
  std::map<std::uint8_t, CategoryBytes> live;
  std::uint64_t gaps = 0;
  std::map<std::uint8_t, CategoryBytes> at_peak;
  for_event_rows(path, [&](std::span<const EventRow> rows) {
    for (const EventRow& row : rows) {
      const auto kind = static_cast<EventKind>(row.kind);
      if (kind == gap) gaps += row.bytes;
      if (row.block < 0) continue;
      auto& categories = live[row.device];
      const auto bytes = static_cast<std::int64_t>(row.bytes);
      if (kind == EventKind::free) categories[row.category] -= bytes;
      if (kind == alloc || kind == seed) categories[row.category] += bytes;
      if (kind == retag) {
        categories[row.before] -= bytes;
        categories[row.category] += bytes;
      }
      for (const auto& device : result.devices) {
        if (device.peak.event == row.event) at_peak[device.id] = live[device.id];
      }
    }
  });
  std::uint64_t missing = 0;
  for (const auto& one : result.gaps) missing += one.events;
  EXPECT_EQ(gaps, missing);
  for (const auto& device : result.devices) {
    std::int64_t sum = 0;
    for (const std::int64_t bytes : live[device.id]) {
      EXPECT_GE(bytes, 0);
      sum += bytes;
    }
    EXPECT_EQ(sum, device.end_bytes);
    sum = 0;
    for (const std::int64_t bytes : at_peak[device.id]) sum += bytes;
    if (device.peak.bytes > 0) {
      EXPECT_EQ(sum, device.peak.bytes);
    }
  }
}

std::uint64_t records_on_disk(const std::string& path) {
  std::uint64_t bytes = std::filesystem::file_size(path) - kHeaderBytes;
  for (const std::string& later : later_pieces(path)) {
    bytes += std::filesystem::file_size(later) - kHeaderBytes;
  }
  return bytes / sizeof(Event);
}

TEST(FlightRecorder, KeepsThePeakAndTheEndOfAnyRunInATinyBound) {
  const std::string path = (scratch() / "flight.bin").string();
  std::size_t with_gaps = 0;
  for (unsigned seed = 1; seed <= 50 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    RandomRun run(seed);
    const std::uint64_t capacity = 64 + random() % 3000;
    std::vector<Event> events(random() % 8000);
    std::generate(events.begin(), events.end(), [&] { return run.next(); });
    FileHeader header{};
    {
      FlightRecorder recorder(path, capacity);
      for (std::size_t at = 0; at < events.size();) {
        const std::size_t count = std::min<std::size_t>(events.size() - at, 1 + random() % 700);
        recorder.take(std::span(events).subspan(at, count));
        at += count;
      }
      recorder.write_header(true);
      header = recorder.header();
      EXPECT_EQ(recorder.lost(), 0U);
    }
    const ReplayResult kept = replay(path);
    expect_the_same(kept, whole(events, header), events);
    expect_rows_to_add_up(path, kept);
    with_gaps += kept.gaps.empty() ? 0 : 1;
    // At most 120 blocks live: pieces of at most max(capacity / 16, 240) events and 120 seeds, and
    // as many settled blocks.
    EXPECT_LE(records_on_disk(path),
              std::max<std::uint64_t>(
                  capacity, 10 * (std::max<std::uint64_t>(capacity / 16, 242) + 2 * 121)));
  }
  EXPECT_GT(with_gaps, 20U);
}

TEST(FlightRecorder, AShortRunIsOneFileWithoutGaps) {
  const std::string path = (scratch() / "short.bin").string();
  std::ofstream(piece_path(path, 7)) << "of an earlier run";
  RandomRun run(5);
  std::vector<Event> events(100);
  std::generate(events.begin(), events.end(), [&] { return run.next(); });
  {
    FlightRecorder recorder(path, 100'000);
    recorder.take(events);
    recorder.write_header(true);
  }
  EXPECT_TRUE(later_pieces(path).empty());
  EXPECT_EQ(std::filesystem::file_size(path), kHeaderBytes + 100 * sizeof(Event));
  EXPECT_TRUE(replay(path).gaps.empty());
  EXPECT_EQ(replay(path).events, 100U);
}

// What pieces there are does not matter to who reads: without a gap it is one file.
TEST(FlightRecorder, PiecesWithoutAGapAreAsOneFile) {
  const std::string path = (scratch() / "pieces.bin").string();
  RandomRun run(11);
  std::vector<Event> events(20'000);
  std::generate(events.begin(), events.end(), [&] { return run.next(); });
  FlightRecorder recorder(path, 40'000);
  recorder.take(events);
  recorder.write_header(true);
  EXPECT_GE(later_pieces(path).size(), 7U);
  const ReplayResult kept = replay(path);
  EXPECT_TRUE(kept.gaps.empty());
  expect_the_same(kept, whole(events, recorder.header()), events);
}

// Also where a piece after a gap begins with it.
TEST(FlightRecorder, TheEndOfAStepIsKnownWhereverItIsInAPiece) {
  const std::string path = (scratch() / "step.bin").string();
  constexpr std::size_t kEvents = 500;
  std::size_t right_after_a_gap = 0;
  for (std::size_t at = kEvents - 100; at < kEvents; ++at) {
    SCOPED_TRACE("at " + std::to_string(at));
    std::vector<Event> events(kEvents);
    for (std::size_t i = 0, changes = 0; i < kEvents; ++i) {
      Event& event = events[i];
      event.time = 3 * i;
      event.step = (i < 5 ? 0U : 1U) + (i < at ? 0U : 1U);
      event.kind = static_cast<std::uint8_t>(step);
      if (i == 5 || i == at) continue;
      event.kind = static_cast<std::uint8_t>(changes++ % 2 == 0 ? alloc : EventKind::free);
      event.address = 0x1000;
      event.device = 1;
      event.size = 100;
    }
    FlightRecorder recorder(path, 64);
    recorder.take(events);
    recorder.write_header(true);
    const ReplayResult kept = replay(path);
    expect_the_same(kept, whole(events, recorder.header()), events);
    ASSERT_FALSE(kept.gaps.empty());
    right_after_a_gap += kept.gaps.back().first_event + kept.gaps.back().events == at ? 1 : 0;
  }
  EXPECT_EQ(right_after_a_gap, 1U);
}

// Of other runs, and what a reader of a live run meets.
TEST(FlightRecorder, APieceOfAnotherRunOrWithoutItsLiveSetIsLeftOut) {
  const std::string path = (scratch() / "foreign.bin").string();
  RandomRun run(3);
  std::vector<Event> events(6000);
  std::generate(events.begin(), events.end(), [&] { return run.next(); });
  FlightRecorder recorder(path, 16 * 1000);
  recorder.take(events);
  recorder.write_header(false);
  const std::vector<std::string> later = later_pieces(path);
  ASSERT_EQ(later.size(), 5U);
  std::filesystem::copy_file(piece_path(path, 1), piece_path(path, 900));
  std::filesystem::resize_file(piece_path(path, 5), kHeaderBytes + 32);
  const ReplayResult kept = replay(path);
  std::filesystem::remove(piece_path(path, 900));
  EXPECT_EQ(kept.events, 5000U);
  ASSERT_EQ(kept.gaps.size(), 1U);
  EXPECT_EQ(kept.gaps[0].first_event, 5000U);
  EXPECT_EQ(kept.gaps[0].events, 1000U);
  EXPECT_EQ(kept.contradictions.double_allocations, 0U);
}

// A process is killed in the middle of whatever its writer does.
TEST(FlightRecorder, IsReadableWheneverTheProcessIsKilled) {
  const std::string path = (scratch() / "killed.bin").string();
  std::mt19937 random(1);
  std::size_t with_gaps = 0;
  for (unsigned round = 0; round < 40 && !::testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    for (const std::string& later : later_pieces(path)) std::filesystem::remove(later);
    const pid_t child = ::fork();
    if (child == 0) {
      RandomRun run(round);
      EventFile file(path, 600, {});
      // Fewer than 600 steps, which a replay keeps at most.
      for (int count = 0; count < 80; ++count) {
        for (int i = 0; i < 500; ++i) file.append(std::bit_cast<EventWords>(run.next()));
        ::usleep(200);
      }
      for (;;) ::pause();
    }
    while (later_pieces(path).empty()) ::usleep(1000);
    ::usleep(random() % 60'000);
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    const ReplayResult kept = replay(path);
    EXPECT_EQ(kept.header.closed, 0U);
    std::uint64_t count = kept.events;
    for (const auto& gap : kept.gaps) count += gap.events;
    RandomRun run(round);
    std::vector<Event> events(count);
    std::generate(events.begin(), events.end(), [&] { return run.next(); });
    // The header's count may be ahead of no piece: what it counts was written before.
    EXPECT_LE(kept.header.count, count);
    expect_the_same(kept, whole(events, kept.header), events);
    with_gaps += kept.gaps.empty() ? 0 : 1;
  }
  EXPECT_GT(with_gaps, 16U);
}

}  // namespace
}  // namespace opacus_memprof
