// SPDX-License-Identifier: Apache-2.0
#include "core/event_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "core/event_reader.h"
#include "core/replay.h"

namespace opacus_memprof {
namespace {

class EventFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "memprof_XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  [[nodiscard]] std::string path() const { return folder_ + "/events.bin"; }

  static EventWords alloc(std::uint64_t size) {
    Event event{};
    event.kind = static_cast<std::uint8_t>(EventKind::alloc);
    event.address = 0x1000 + size;
    event.size = size;
    event.module = 7;
    return std::bit_cast<EventWords>(event);
  }

  // Read with plain file functions: an account of its own.
  struct Content {
    FileHeader header{};
    std::vector<Event> events;
  };
  [[nodiscard]] Content content() const {
    std::ifstream in(path(), std::ios::binary);
    Content result;
    in.read(reinterpret_cast<char*>(&result.header), sizeof(FileHeader));
    in.seekg(kHeaderBytes);
    Event event{};
    while (in.read(reinterpret_cast<char*>(&event), sizeof(event)) && event.kind != 0) {
      result.events.push_back(event);
    }
    return result;
  }

  std::string folder_;
};

TEST_F(EventFileTest, HoldsExactlyWhatWasAppended) {
  {
    EventFile file(path(), 1000, {});
    for (int i = 1; i <= 10; ++i) file.append(alloc(i));
  }
  const Content found = content();
  EXPECT_EQ(std::memcmp(found.header.magic, kMagic, sizeof(kMagic)), 0);
  EXPECT_EQ(found.header.version, kEventVersion);
  EXPECT_EQ(found.header.record_bytes, 32U);
  EXPECT_EQ(found.header.count, 10U);
  EXPECT_EQ(found.header.dropped, 0U);
  EXPECT_EQ(found.header.closed, 1U);
  EXPECT_GE(found.header.last_ticks, found.header.start_ticks);
  ASSERT_EQ(found.events.size(), 10U);
  EXPECT_EQ(found.events[9].size, 10U);
  EXPECT_EQ(found.events[9].module, 7U);
  EXPECT_EQ(std::filesystem::file_size(path()), kHeaderBytes + 10 * 32);
}

// The file's thread cannot keep up where the events have no end: it is held up by a call.
TEST_F(EventFileTest, WhatFindsNoRoomInMemoryIsAGapAfterWhichTheLiveSetIsKnown) {
  constexpr std::uint64_t kBlocks = EventRing::kEvents + 1000;
  std::vector<Block> live;
  std::atomic<bool> held{true};
  std::atomic<bool> went_on{false};
  {
    EventFile::Calls calls;
    calls.housekeeping = [&] {
      while (held) ::usleep(100);
    };
    calls.live_blocks = [&](EventFile& file) {
      file.resume();
      went_on = true;
      return live;
    };
    EventFile file(path(), std::uint64_t{1} << 25U, calls);
    ::usleep(20'000);  // the thread is in the call
    for (std::uint64_t i = 1; i <= kBlocks; ++i) file.append(alloc(i));
    EXPECT_EQ(file.written(), EventRing::kEvents);
    EXPECT_EQ(file.dropped(), 1000U);
    Block block;  // all but one have gone meanwhile, and one has come
    block.address = 0x1000 + 5;
    block.set(5, 0, 0);
    live.push_back(block);
    block.address = 0x77;
    block.set(70, 0, 0);
    live.push_back(block);
    held = false;
    while (!went_on) ::usleep(100);
    file.append(alloc(9));
    file.flush();
    EXPECT_EQ(file.dropped(), 1000U);
  }
  const ReplayResult result = replay(path());
  ASSERT_EQ(result.gaps.size(), 1U);
  EXPECT_EQ(result.gaps[0].first_event, EventRing::kEvents);
  EXPECT_EQ(result.gaps[0].events, 1000U);
  EXPECT_EQ(result.header.dropped, 1000U);
  EXPECT_EQ(result.header.count, EventRing::kEvents + 1001);
  EXPECT_EQ(result.devices.at(0).end_bytes, 5 + 70 + 9);
  EXPECT_EQ(result.contradictions.double_allocations, 0U);
}

TEST_F(EventFileTest, WhatWasFlushedIsInTheFile) {
  EventFile file(path(), 1'000'000, {});
  for (std::uint64_t i = 1; i <= 400'000; ++i) {
    file.append(alloc(i));
    if (i % 100'000 != 0) continue;
    file.flush();
    EventReader reader(path());
    EXPECT_EQ(reader.header().count, i);
    while (reader.next()) {
    }
    EXPECT_EQ(reader.position(), i);
  }
  EXPECT_EQ(file.error(), "");
}

TEST_F(EventFileTest, AKilledProcessLosesNothingThatWasFlushed) {
  constexpr int kEvents = 1000;
  const pid_t child = ::fork();
  if (child == 0) {
    EventFile file(path(), 100'000, {});
    for (int i = 1; i <= kEvents; ++i) file.append(alloc(static_cast<std::uint64_t>(i)));
    file.flush();
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(content().events.size(), static_cast<std::size_t>(kEvents));
  EXPECT_EQ(content().header.closed, 0U);
  EventReader reader(path());
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.records().size(), static_cast<std::size_t>(kEvents));
  EXPECT_EQ(reader.records().back().size, static_cast<std::uint64_t>(kEvents));
  EXPECT_FALSE(reader.next());
}

// What is written without a flush is there a moment later.
TEST_F(EventFileTest, NobodyNeedsToFlush) {
  EventFile file(path(), 100'000, {});
  file.append(alloc(1));
  while (content().events.empty()) ::usleep(1000);
  EXPECT_EQ(content().events[0].size, 1U);
}

TEST_F(EventFileTest, AFolderThatIsNotThereIsSaid) {
  EXPECT_THROW(EventFile(folder_ + "/missing/events.bin", 10, {}), std::system_error);
}

TEST_F(EventFileTest, AThreadThatCannotBeStartedIsSaidAndLeavesNothing) {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = descriptors();
  pthread_attr_t usual;
  pthread_attr_t huge;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_getattr_default_np(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, std::size_t{1} << 47U), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  EXPECT_THROW(EventFile(path(), 10, {}), std::system_error);
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  EXPECT_EQ(descriptors(), before);
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(EventFileTest, ADeviceWithoutRoomIsSaidAndLeavesNoFile) {
  // A file that may not grow: the reservation is refused as on a full disk.
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{.rlim_cur = 8192, .rlim_max = 8192};
    std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      EventFile file(path(), 1'000'000, {});
    } catch (const std::system_error& error) {
      ::_exit(error.code().value() == EFBIG && !std::filesystem::exists(path()) ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(EventFileTest, AFullDiskEndsNothingAndIsSaid) {
  const pid_t child = ::fork();
  if (child == 0) {
    EventFile file(path(), 160'000, {});
    const rlimit limit{.rlim_cur = 65536, .rlim_max = 65536};
    std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limit);
    for (std::uint64_t i = 1; i <= 20'000; ++i) file.append(alloc(i));
    file.flush();
    ::_exit(!file.error().empty() && file.dropped() > 10'000 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const ReplayResult result = replay(path());
  ASSERT_EQ(result.gaps.size(), 1U);
  EXPECT_EQ(result.gaps[0].first_event + result.gaps[0].events, 20'000U);
  EXPECT_EQ(result.gaps[0].events, result.header.dropped);
}

TEST_F(EventFileTest, HousekeepingRuns) {
  std::atomic<int> runs{0};
  {
    EventFile file(path(), 10, {.housekeeping = [&] { ++runs; }, .live_blocks = {}});
    while (runs == 0) ::usleep(1000);
  }
  EXPECT_GE(runs, 1);
}

}  // namespace
}  // namespace opacus_memprof
