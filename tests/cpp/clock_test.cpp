// SPDX-License-Identifier: Apache-2.0
#include "core/clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

#include "core/event_file.h"
#include "core/replay.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kHour = 3600 * kSecond;

// The file's own thread reads them as well.
std::atomic<std::uint64_t> monotonic{0};
std::atomic<std::uint64_t> wall{0};

// Clocks that stand still but where the test moves them, on a processor without a counter.
class Clock : public ::testing::Test {
 protected:
  void SetUp() override {
    monotonic = 5 * kSecond;
    wall = 1'700'000'000 * kSecond;
    before_ = replace_clocks({.monotonic_ns = []() noexcept { return monotonic.load(); },
                              .wall_ns = []() noexcept { return wall.load(); },
                              .counter = false});
  }
  void TearDown() override { replace_clocks(before_); }

 private:
  Clocks before_{};
};

EventWords alloc(std::uint64_t address, std::uint64_t time) {
  Event event{};
  event.kind = static_cast<std::uint8_t>(EventKind::alloc);
  event.time = time;
  event.address = address;
  event.size = 100;
  event.device = 1;
  return std::bit_cast<EventWords>(event);
}

TEST_F(Clock, WithoutACounterTicksAreTheMonotonicClock) {
  EXPECT_EQ(ticks(), 5 * kSecond);
  monotonic += 7;
  EXPECT_EQ(ticks(), 5 * kSecond + 7);
}

TEST_F(Clock, TheWallClockIsReadOnce) {
  EXPECT_EQ(unix_ns(), wall);
  wall += kHour;
  monotonic += 3;
  EXPECT_EQ(unix_ns(), 1'700'000'000 * kSecond + 3);
  set_wall_clock();
  EXPECT_EQ(unix_ns(), wall);
}

TEST_F(Clock, AnHourThatTheWallClockJumpsChangesNoDuration) {
  for (const bool back : {false, true}) {
    const std::string path = (testing::scratch() / "clock.bin").string();
    const std::uint64_t began = wall;
    {
      EventFile file(path, 100, {});
      file.append(alloc(0x1000, file.next_time()));
      wall += back ? -kHour : kHour;
      monotonic += kSecond / 2;
      file.append(alloc(0x2000, file.next_time()));
      monotonic += kSecond / 2;
    }
    const ReplayResult result = replay(path);
    EXPECT_EQ(result.header.start_unix_ns, began);
    EXPECT_EQ(result.header.last_unix_ns, began + kSecond);
    EXPECT_EQ(result.devices.at(0).peak.time_ns, static_cast<std::int64_t>(kSecond / 2));
  }
}

// As the counters of two cores are, of which one is a little behind.
TEST_F(Clock, TimesOfEventsRiseThoughTheClockStandsStillOrIsBehind) {
  EventFile file((testing::scratch() / "behind.bin").string(), 100, {});
  monotonic += 10;
  EXPECT_EQ(file.next_time(), 10);
  EXPECT_EQ(file.next_time(), 11);
  monotonic -= 5;
  EXPECT_EQ(file.next_time(), 12);
  monotonic += 20;
  EXPECT_EQ(file.next_time(), 25);
}

// A free reads no clock: an event before it has, or the file's thread, a few milliseconds ago.
TEST_F(Clock, AFreeIsAfterWhatIsBeforeItAndAPauseIsSeen) {
  EventFile file((testing::scratch() / "unread.bin").string(), 100, {});
  monotonic += 10;
  EXPECT_EQ(file.next_time(), 10);
  EXPECT_EQ(file.next_time_unread(), 11);
  monotonic += kSecond;  // more than there are frees below
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::uint64_t time = 11;
  while (time < kSecond && std::chrono::steady_clock::now() < patience) {
    const std::uint64_t before = std::exchange(time, file.next_time_unread());
    ASSERT_GT(time, before);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GE(time, kSecond);
  EXPECT_GT(file.next_time(), time);
}

TEST(SystemClocks, GoForward) {
  const std::uint64_t ticks_before = ticks();
  const std::uint64_t before = unix_ns();
  EXPECT_GT(before, 1'600'000'000 * kSecond);
  while (unix_ns() == before) {
  }
  EXPECT_GT(unix_ns(), before);
  EXPECT_GT(ticks(), ticks_before);
}

}  // namespace
}  // namespace opacus_memprof
