// SPDX-License-Identifier: Apache-2.0
#include "core/follower.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/recorder.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using testing::scratch;
using enum EventKind;

TEST(Follower, reads_on_where_it_ended) {
  EventFileBuilder file;
  file.header.closed = 0;
  file.add({.kind = seed, .address = 0x40, .size = 7, .category = Category::buffers, .step = 9})
      .add({.kind = alloc, .address = 0x80, .size = 100, .phase = Phase::forward, .module = 2});
  const std::string path = file.write();
  Follower follower(path);
  EXPECT_EQ(follower.advance(), 2U);
  EXPECT_EQ(follower.devices().at(1).bytes, 107);
  EXPECT_EQ(follower.phase(), static_cast<std::uint8_t>(Phase::forward));
  EXPECT_EQ(follower.step(), 0U) << "a seed's step is that of its birth";
  EXPECT_EQ(follower.advance(), 0U);
  EXPECT_EQ(follower.devices().at(1).bytes, 107);

  file.add({.kind = free, .address = 0x80, .size = 100})
      .add({.kind = step, .size = 3, .step = 1})
      .add({.kind = oom, .size = 1 << 30, .step = 1});
  file.header.closed = 1;
  EXPECT_EQ(file.write(), path);
  EXPECT_EQ(follower.advance(), 3U);
  const Follower::Device& device = follower.devices().at(1);
  EXPECT_EQ(device.bytes, 7);
  EXPECT_EQ(device.peak_bytes, 107);
  EXPECT_EQ(device.step_ends, std::deque<std::int64_t>{7});
  EXPECT_EQ(device.modules.size(), 1U) << "those with live blocks";
  EXPECT_EQ(follower.step(), 1U);
  EXPECT_EQ(follower.logical_step(), 3U);
  EXPECT_EQ(follower.out_of_memory(), 1U);
  EXPECT_TRUE(follower.header().closed);
}

TEST(Follower, ends_at_a_record_that_was_not_written_yet) {
  EventFileBuilder file;
  file.header.closed = 0;
  file.add({.kind = alloc, .address = 0x40, .size = 5}).add({.kind = none});
  const std::string path = file.write();
  Follower follower(path);
  EXPECT_EQ(follower.advance(), 1U);
  file.events.pop_back();
  file.add({.kind = alloc, .address = 0x80, .size = 6}).add({.kind = none});
  EXPECT_EQ(file.write(), path);
  EXPECT_EQ(follower.advance(), 1U);
  EXPECT_EQ(follower.devices().at(1).bytes, 11);
}

TEST(Follower, remembers_the_newest_steps) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 0x40, .size = 5});
  for (std::uint32_t number = 1; number <= 500; ++number) {
    file.add({.kind = alloc, .address = 0x1000 * number, .size = number, .step = number - 1})
        .add({.kind = step, .size = number, .step = number})
        .add({.kind = free, .address = 0x1000 * number, .size = number, .step = number});
  }
  Follower follower(file.write());
  follower.advance();
  const auto& ends = follower.devices().at(1).step_ends;
  ASSERT_EQ(ends.size(), Follower::kRecentSteps);
  EXPECT_EQ(ends.back(), 505);
  EXPECT_EQ(ends.front(), 505 - static_cast<std::int64_t>(Follower::kRecentSteps) + 1);
}

// The recorder's own counters are the oracle, at any moment of a random run that goes on.
TEST(Follower, agrees_with_the_recorder_that_writes) {
  Recorder recorder;
  const std::string path = (scratch() / "events.bin").string();
  recorder.start_events(std::make_unique<EventFile>(path, 1 << 16, EventFile::Calls{}));
  Follower follower(path);
  std::mt19937 random(7);
  std::vector<std::uintptr_t> live;
  std::uintptr_t next = 0x1000;
  for (int round = 0; round < 40; ++round) {
    for (std::uint32_t i = random() % 700; i > 0; --i) {
      if (!live.empty() && random() % 2 == 0) {
        std::swap(live[random() % live.size()], live.back());
        recorder.on_free(live.back(), Phase::idle);
        live.pop_back();
      } else if (!live.empty() && random() % 4 == 0) {
        recorder.retag(live[random() % live.size()],
                       static_cast<std::uint8_t>(random() % kBuiltinCategories), 3);
      } else {
        const Tag tag{.category = static_cast<std::uint8_t>(random() % kBuiltinCategories),
                      .phase = 0,
                      .module = static_cast<std::uint16_t>(random() % 5),
                      .op = 0};
        recorder.on_alloc(next, 1 + random() % 9999, static_cast<Device>(random() % 3), 0, tag);
        live.push_back(next);
        next += 0x100;
      }
    }
    recorder.flush_events();
    follower.advance();
    const auto snapshot = recorder.snapshot("look");
    std::int64_t modules = 0;
    std::int64_t total = 0;
    for (const auto& state : snapshot.devices) {
      const Follower::Device& device = follower.devices().at(state.device);
      EXPECT_EQ(device.bytes, state.requested);
      EXPECT_EQ(device.categories, state.categories);
      total += state.requested;
      for (const auto& [id, categories] : device.modules) {
        for (const std::int64_t bytes : categories) modules += bytes;
      }
    }
    EXPECT_EQ(modules, total);
  }
  recorder.stop_events().reset();
  follower.advance();
  EXPECT_EQ(follower.contradictions().unknown_frees + follower.contradictions().double_allocations +
                follower.contradictions().category_mismatches +
                follower.contradictions().unknown_retags,
            0U);
  EXPECT_TRUE(follower.header().closed);
  EXPECT_EQ(follower.events(), follower.header().count);
}

}  // namespace
}  // namespace opacus_memprof
