// SPDX-License-Identifier: Apache-2.0
#include "core/event_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "core/event_reader.h"

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
  EXPECT_EQ(found.header.version, kFormatVersion);
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

TEST_F(EventFileTest, CountsWhatFindsNoRoom) {
  {
    EventFile file(path(), 3, {});
    for (int i = 1; i <= 5; ++i) file.append(alloc(i));
  }
  EXPECT_EQ(content().header.count, 3U);
  EXPECT_EQ(content().header.dropped, 2U);
  EXPECT_EQ(content().events.back().size, 3U);
}

TEST_F(EventFileTest, GrowsPastItsFirstReservation) {
  constexpr std::uint64_t kEvents = 400'000;  // three chunks
  {
    EventFile file(path(), 1'000'000, {});
    for (std::uint64_t i = 1; i <= kEvents; ++i) file.append(alloc(i));
    EXPECT_EQ(file.written(), kEvents);
    EXPECT_EQ(file.error(), "");
  }
  EXPECT_EQ(content().header.count, kEvents);
  EXPECT_EQ(content().events.back().size, kEvents);
}

TEST_F(EventFileTest, AKilledProcessLosesNothing) {
  constexpr int kEvents = 1000;
  const pid_t child = ::fork();
  if (child == 0) {
    EventFile file(path(), 100'000, {});
    for (int i = 1; i <= kEvents; ++i) file.append(alloc(static_cast<std::uint64_t>(i)));
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(content().events.size(), static_cast<std::size_t>(kEvents));
  EXPECT_EQ(content().header.closed, 0U);
  EventReader reader(path());
  const auto records = reader.next();
  ASSERT_GE(records.size(), static_cast<std::size_t>(kEvents));
  EXPECT_EQ(records[kEvents - 1].size, static_cast<std::uint64_t>(kEvents));
  EXPECT_EQ(records[kEvents].kind, 0U);
}

TEST_F(EventFileTest, AFolderThatIsNotThereIsSaid) {
  EXPECT_THROW(EventFile(folder_ + "/missing/events.bin", 10, {}), std::system_error);
}

TEST_F(EventFileTest, MoreThanCanBeMappedIsSaidAndLeavesNoFile) {
  for (const std::uint64_t capacity : {std::uint64_t{1} << 45U, std::uint64_t{1} << 59U}) {
    EXPECT_THROW(EventFile(path(), capacity, {}), std::system_error);
    EXPECT_FALSE(std::filesystem::exists(path()));
  }
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

TEST_F(EventFileTest, HousekeepingRuns) {
  std::atomic<int> runs{0};
  {
    EventFile file(path(), 10, [&] { ++runs; });
    while (runs == 0) ::usleep(1000);
  }
  EXPECT_GE(runs, 1);
}

}  // namespace
}  // namespace opacus_memprof
