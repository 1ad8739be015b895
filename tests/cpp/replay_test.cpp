// SPDX-License-Identifier: Apache-2.0
#include "core/replay.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <stdexcept>

#include "core/event_reader.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using enum EventKind;

std::int64_t at(const CategoryBytes& bytes, Category category) {
  return bytes[static_cast<std::size_t>(category)];
}

std::int64_t sum(const CategoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

std::string error_of(const std::string& path) {
  try {
    replay(path);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string file_with(const std::string& content) {
  const auto path = testing::scratch() / "content.bin";
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
  return path.string();
}

TEST(ReplayFile, refuses_what_is_no_event_file) {
  EXPECT_NE(error_of("/nowhere/events.bin").find("cannot open"), std::string::npos);
  EXPECT_NE(error_of(file_with("")).find("is truncated: it has 0 bytes"), std::string::npos);
  EXPECT_NE(error_of(file_with(std::string(4095, 'x'))).find("is truncated"), std::string::npos);
  EXPECT_NE(error_of(file_with(std::string(8192, 'x'))).find("is not an event file"),
            std::string::npos);
  EventFileBuilder newer;
  newer.header.version = kEventVersion + 1;
  EXPECT_NE(error_of(newer.write()).find("has format version 3"), std::string::npos);
  EventFileBuilder wider;
  wider.header.record_bytes = 64;
  EXPECT_NE(error_of(wider.write()).find("records of 64 bytes"), std::string::npos);
}

TEST(ReplayFile, an_empty_one_has_no_devices) {
  const ReplayResult result = replay(EventFileBuilder().write());
  EXPECT_EQ(result.events, 0U);
  EXPECT_TRUE(result.devices.empty());
}

TEST(ReplayFile, a_count_beyond_the_end_is_not_believed) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 10});
  file.header.count = 1'000'000'000'000;
  const ReplayResult result = replay(file.write());
  EXPECT_EQ(result.events, 1U);
  EXPECT_EQ(result.devices.at(0).peak.bytes, 10);
}

TEST(ReplayFile, records_beyond_the_count_and_unwritten_ones_are_not_read) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 10});
  file.add({.kind = alloc, .address = 128, .size = 100});
  file.header.count = 1;
  EXPECT_EQ(replay(file.write()).devices.at(0).peak.bytes, 10);

  EventFileBuilder torn;
  torn.add({.kind = alloc, .address = 64, .size = 10});
  torn.add({});
  torn.add({.kind = alloc, .address = 128, .size = 100});
  const ReplayResult result = replay(torn.write());
  EXPECT_EQ(result.events, 1U);
  EXPECT_EQ(result.devices.at(0).peak.bytes, 10);
}

TEST(Replay, finds_the_first_instant_of_the_peak) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 100, .category = Category::gradients});
  file.add({.kind = alloc, .address = 128, .size = 50, .phase = Phase::clip, .step = 3});  // 150
  file.add({.kind = retag, .address = 128, .size = 50, .category = Category::noise, .module = 7});
  file.add({.kind = free, .address = 64, .size = 100, .category = Category::gradients});
  file.add({.kind = alloc, .address = 64, .size = 100, .category = Category::inputs});  // 150 again
  file.header.start_unix_ns = 1'000'000;
  file.header.last_unix_ns = 1'002'000;
  const ReplayResult result = replay(file.write());
  ASSERT_EQ(result.devices.size(), 1U);
  const auto& device = result.devices[0];
  EXPECT_EQ(device.id, 1);
  EXPECT_EQ(device.peak.event, 1U);
  EXPECT_EQ(device.peak.bytes, 150);
  EXPECT_EQ(device.peak.step, 3U);
  EXPECT_EQ(device.peak.phase, static_cast<std::uint8_t>(Phase::clip));
  EXPECT_EQ(device.peak.time_ns, 4);  // the second tick, at 2 ns
  // The retag came while the bytes stood at their peak.
  EXPECT_EQ(at(device.peak.categories, Category::noise), 50);
  EXPECT_EQ(at(device.peak.categories, Category::gradients), 100);
  EXPECT_EQ(sum(device.peak.categories), 150);
  ASSERT_EQ(device.modules.size(), 2U);
  EXPECT_EQ(device.modules[1].id, 7);
  EXPECT_EQ(at(device.modules[1].categories, Category::noise), 50);
  EXPECT_EQ(at(device.born_in[static_cast<std::size_t>(Phase::clip)], Category::noise), 50);
  ASSERT_EQ(device.largest_blocks.size(), 2U);
  EXPECT_EQ(device.largest_blocks[0].bytes, 100U);
  EXPECT_EQ(device.largest_blocks[1].step, 3U);
  EXPECT_EQ(device.end_bytes, 150);
}

TEST(Replay, a_devices_peak_is_its_own) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 1, .device = 2});
  file.add({.kind = alloc, .address = 64, .size = 7, .device = 0});
  file.add({.kind = free, .address = 64, .device = 2});
  const ReplayResult result = replay(file.write());
  ASSERT_EQ(result.devices.size(), 2U);
  EXPECT_EQ(result.devices[0].id, 0);
  EXPECT_EQ(result.devices[0].end_bytes, 7);
  EXPECT_EQ(result.devices[1].peak.bytes, 1);
  EXPECT_EQ(result.devices[1].end_bytes, 0);
}

TEST(Replay, steps_have_their_peak_and_what_is_left) {
  EventFileBuilder file;
  file.add({.kind = seed, .address = 64, .size = 5, .step = 9});  // its birth, not now
  file.add({.kind = alloc, .address = 128, .size = 20, .step = 10});
  file.add({.kind = free, .address = 128, .step = 10});
  file.add({.kind = step, .size = 4, .step = 11});
  file.add({.kind = step, .size = 5, .step = 12});
  file.add({.kind = alloc, .address = 128, .size = 30, .step = 12});
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.steps.size(), 3U);
  EXPECT_EQ(device.steps[0].number, 10U);
  EXPECT_EQ(device.steps[0].peak.bytes, 25);
  EXPECT_EQ(device.steps[0].end_bytes, 5);
  EXPECT_TRUE(device.steps[0].complete);
  EXPECT_EQ(device.steps[1].number, 11U);
  EXPECT_EQ(device.steps[1].peak.bytes, 5);  // it allocated nothing: what was there
  EXPECT_EQ(device.steps[1].peak.logical_step, 4U);
  EXPECT_EQ(device.steps[2].number, 12U);
  EXPECT_EQ(device.steps[2].peak.bytes, 35);
  EXPECT_EQ(device.steps[2].end_bytes, 35);
  EXPECT_FALSE(device.steps[2].complete);
  EXPECT_EQ(device.peak.logical_step, 5U);
}

TEST(Replay, of_many_steps_the_ends_and_the_highest_are_kept) {
  constexpr std::uint32_t kSteps = 3 * ReplayResult::kMaxSteps;
  constexpr std::uint32_t kHighest = kSteps / 2;
  EventFileBuilder file;
  for (std::uint32_t number = 0; number < kSteps; ++number) {
    const std::uint64_t size = number == kHighest ? 9000 : number + 1;
    file.add({.kind = alloc, .address = 64, .size = size, .step = number});
    file.add({.kind = free, .address = 64, .step = number});
    file.add({.kind = step, .size = number + 1, .step = number + 1});
  }
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.steps.size(), ReplayResult::kMaxSteps);
  EXPECT_EQ(device.steps_left_out, kSteps + 1 - ReplayResult::kMaxSteps);  // one has just begun
  const auto row = [&](std::uint32_t number) {
    return std::count_if(device.steps.begin(), device.steps.end(),
                         [&](const auto& step) { return step.number == number; });
  };
  EXPECT_EQ(row(0), 1);
  EXPECT_EQ(row(199), 1);
  EXPECT_EQ(row(200), 0);
  EXPECT_EQ(row(kHighest), 1);
  EXPECT_EQ(row(kSteps), 1);
  for (const auto& step : device.steps) EXPECT_EQ(sum(step.peak.categories), step.peak.bytes);
  EXPECT_TRUE(std::is_sorted(device.steps.begin(), device.steps.end(),
                             [](const auto& a, const auto& b) { return a.number < b.number; }));
}

TEST(Replay, of_many_snapshots_the_ends_and_the_highest_are_kept) {
  constexpr std::uint64_t kSnapshots = 3 * ReplayResult::kMaxSnapshots;
  constexpr std::uint64_t kHighest = kSnapshots / 2;
  EventFileBuilder file;
  for (std::uint64_t number = 0; number < kSnapshots; ++number) {
    const std::uint64_t size = number == kHighest ? 9000 : number + 1;
    file.add({.kind = alloc, .address = 64, .size = size});
    file.add({.kind = snapshot, .size = number, .op = 5});
    file.add({.kind = free, .address = 64});
  }
  const auto snapshots = replay(file.write()).devices.at(0).snapshots;
  ASSERT_EQ(snapshots.size(), ReplayResult::kMaxSnapshots);
  const auto row = [&](std::uint64_t number) {
    return std::count_if(snapshots.begin(), snapshots.end(),
                         [&](const auto& each) { return each.number == number; });
  };
  EXPECT_EQ(row(0), 1);
  EXPECT_EQ(row(199), 1);
  EXPECT_EQ(row(200), 0);
  EXPECT_EQ(row(kHighest), 1);
  EXPECT_EQ(row(kSnapshots - 1), 1);
  for (const auto& each : snapshots) {
    EXPECT_EQ(sum(each.categories), each.bytes);
    EXPECT_EQ(each.name, 5U);
  }
  EXPECT_TRUE(std::is_sorted(snapshots.begin(), snapshots.end(),
                             [](const auto& a, const auto& b) { return a.number < b.number; }));
}

TEST(Replay, a_phases_peak_includes_what_it_found) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 80, .phase = Phase::backward});
  file.add({.kind = phase, .phase = Phase::clip});
  file.add({.kind = free, .address = 64, .phase = Phase::clip});
  const auto device = replay(file.write()).devices.at(0);
  EXPECT_EQ(device.phases[static_cast<std::size_t>(Phase::clip)].bytes, 80);
  EXPECT_EQ(device.phases[static_cast<std::size_t>(Phase::clip)].event, 1U);
  EXPECT_EQ(device.phases[static_cast<std::size_t>(Phase::noise)].event, ReplayResult::kNever);
}

TEST(Replay, a_snapshot_and_an_oom_show_their_very_instant) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 10, .category = Category::noise});
  file.add({.kind = snapshot, .size = 3, .op = 5});
  file.add({.kind = oom,
            .size = 1'000'000,
            .category = Category::gradients,
            .phase = Phase::backward,
            .module = 4,
            .op = 2});
  file.add({.kind = retag,
            .address = 64,
            .category = Category::inputs,
            .op = static_cast<std::uint16_t>(Category::noise)});
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.snapshots.size(), 1U);
  EXPECT_EQ(device.snapshots[0].name, 5);
  EXPECT_EQ(device.snapshots[0].number, 3U);
  EXPECT_EQ(at(device.snapshots[0].categories, Category::noise), 10);
  ASSERT_EQ(device.out_of_memory.size(), 1U);
  EXPECT_EQ(device.out_of_memory[0].requested, 1'000'000U);
  EXPECT_EQ(device.out_of_memory[0].module, 4);
  EXPECT_EQ(device.out_of_memory[0].bytes, 10);
  EXPECT_EQ(at(device.out_of_memory[0].categories, Category::noise), 10);
  EXPECT_EQ(at(device.peak.categories, Category::inputs), 10);
}

TEST(Replay, the_timeline_keeps_the_highest_of_each_run_of_events) {
  EventFileBuilder file;
  for (std::uint64_t i = 0; i < 100; ++i) {
    file.add({.kind = alloc, .address = 64, .size = i == 57 ? 500 : 100 + i});
    file.add({.kind = free, .address = 64});
  }
  const auto device = replay(file.write(), {.timeline_points = 10}).devices.at(0);
  ASSERT_EQ(device.timeline.size(), 10U);  // 20 events each, 10 allocations
  for (std::size_t row = 0; row < 10; ++row) {
    EXPECT_EQ(device.timeline[row].bytes, row == 5 ? 500 : static_cast<int>(109 + 10 * row));
  }
  EXPECT_EQ(device.timeline[5].event, device.peak.event);
  EXPECT_EQ(replay(file.write(), {.timeline_points = 0}).devices.at(0).timeline.size(), 1U);
}

TEST(Replay, at_most_fifty_blocks_are_shown) {
  EventFileBuilder file;
  for (std::uint64_t i = 1; i <= 60; ++i) file.add({.kind = alloc, .address = i * 64, .size = i});
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.largest_blocks.size(), 50U);
  EXPECT_EQ(device.largest_blocks.front().bytes, 60U);
  EXPECT_EQ(device.largest_blocks.back().bytes, 11U);
}

TEST(Replay, time_goes_on_when_the_clock_field_is_full) {
  constexpr std::uint64_t kFull = (std::uint64_t{1} << 48) - 1;
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 1, .time = kFull - 1});
  file.add({.kind = free, .address = 64, .time = kFull - 3});  // cores disagree a little: no lap
  file.add({.kind = alloc, .address = 64, .size = 2, .time = 4});
  const auto device = replay(file.write()).devices.at(0);
  EXPECT_EQ(device.peak.time_ns, static_cast<std::int64_t>(2 * (kFull + 1 + 4)));

  EventFileBuilder killed_at_once;
  killed_at_once.header.last_ticks = killed_at_once.header.start_ticks;
  killed_at_once.header.last_unix_ns = killed_at_once.header.start_unix_ns;
  killed_at_once.add({.kind = alloc, .address = 64, .size = 1, .time = 9});
  EXPECT_EQ(replay(killed_at_once.write()).devices.at(0).peak.time_ns, 9);
}

TEST(Replay, what_is_written_between_two_readings_is_not_read) {
  EventFileBuilder file;
  file.header.closed = 0;
  file.add({.kind = alloc, .address = 64, .size = 8});
  file.add({.kind = EventKind::none});  // not written yet
  file.add({.kind = alloc, .address = 128, .size = 8});
  EventReader reader(file.write());
  const auto count = [&] {
    std::size_t records = 0;
    for (reader.rewind(); reader.next();) records += reader.records().size();
    return records;
  };
  EXPECT_EQ(count(), 1U);
  file.events[1].kind = static_cast<std::uint8_t>(alloc);
  const std::string path = file.write();
  EXPECT_EQ(count(), 1U);
  reader.refresh();
  EXPECT_EQ(count(), 3U);
}

TEST(Replay, what_is_not_a_regular_file_is_refused) {
  const std::string fifo = (testing::scratch() / "fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, testing::scratch().string(), std::string("/dev/zero")}) {
    EXPECT_EQ(error_of(path), path + " is not a regular file.");
  }
}

TEST(Replay, contradictions_are_counted_and_no_byte_is_lost) {
  EventFileBuilder file;
  file.add({.kind = free, .address = 64});
  file.add({.kind = retag, .address = 64});
  file.add({.kind = alloc, .address = 64, .size = 10, .category = Category::noise});
  file.add({.kind = alloc, .address = 64, .size = 30, .category = Category::inputs});
  file.add({.kind = retag, .address = 64, .category = Category::gradients});  // was unattributed?
  file.add({.kind = free, .address = 64, .category = Category::noise});       // was gradients
  file.add({.kind = static_cast<EventKind>(77)});
  file.add({.kind = alloc,
            .address = 64,
            .size = 1,
            .category = static_cast<Category>(200),
            .phase = static_cast<Phase>(99)});
  const ReplayResult result = replay(file.write());
  EXPECT_EQ(result.contradictions.unknown_frees, 1U);
  EXPECT_EQ(result.contradictions.unknown_retags, 1U);
  EXPECT_EQ(result.contradictions.double_allocations, 1U);
  EXPECT_EQ(result.contradictions.category_mismatches, 2U);
  EXPECT_EQ(result.contradictions.unreadable, 2U);
  const auto& device = result.devices.at(0);
  EXPECT_EQ(device.peak.bytes, 30);
  EXPECT_EQ(at(device.peak.categories, Category::gradients), 30);
  EXPECT_EQ(device.end_bytes, 1);
}

}  // namespace
}  // namespace opacus_memprof
