// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "virtual_gpu/machine/limits.h"
#include "virtual_gpu/machine/memory.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20U;
constexpr std::size_t kGiB = std::size_t{1} << 30U;

class VirtualMemory : public ::testing::Test {
 protected:
  VirtualMemory() {
    memory_.add_device(10 * kGiB, kGiB);
    memory_.add_device(4 * kGiB, 0);
  }
  Memory memory_;
};

TEST_F(VirtualMemory, AContextTakesItsPartFirst) {
  EXPECT_EQ(memory_.total(0), 10 * kGiB);
  EXPECT_EQ(memory_.free(0), 9 * kGiB);
}

// cuMemGetAllocationGranularity says 2 MiB on every GPU with virtual memory management.
TEST_F(VirtualMemory, RoundsUpToTwoMegabytes) {
  void* const small = memory_.allocate(0, 1);
  EXPECT_EQ(memory_.free(0), 9 * kGiB - 2 * kMiB);
  void* const odd = memory_.allocate(0, 2 * kMiB + 1);
  EXPECT_EQ(memory_.free(0), 9 * kGiB - 6 * kMiB);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(odd) % (2 * kMiB), 0U);
  EXPECT_TRUE(memory_.release(small));
  EXPECT_TRUE(memory_.release(odd));
  EXPECT_EQ(memory_.free(0), 9 * kGiB);
}

TEST_F(VirtualMemory, IsFullWhenItsCapacityIsTaken) {
  void* const all = memory_.allocate(1, 4 * kGiB);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(memory_.free(1), 0U);
  EXPECT_EQ(memory_.allocate(1, 1), nullptr);
  EXPECT_FALSE(memory_.take(1, 1));
  void* const elsewhere = memory_.allocate(0, 1);
  EXPECT_NE(elsewhere, nullptr) << "one device is full, and not the other";
  memory_.release(elsewhere);
  memory_.release(all);
  EXPECT_EQ(memory_.free(1), 4 * kGiB);
}

TEST_F(VirtualMemory, SizesThatOverflowDoNotFit) {
  EXPECT_EQ(memory_.allocate(0, SIZE_MAX), nullptr);
  EXPECT_EQ(memory_.allocate(0, SIZE_MAX - 4 * kMiB), nullptr);
  EXPECT_EQ(memory_.free(0), 9 * kGiB);
}

TEST_F(VirtualMemory, IsReadableAndZero) {
  auto* const bytes = static_cast<unsigned char*>(memory_.allocate(0, 3 * kMiB));
  EXPECT_EQ(bytes[0], 0);
  bytes[3 * kMiB - 1] = 7;
  EXPECT_EQ(bytes[3 * kMiB - 1], 7);
  memory_.release(bytes);
}

TEST_F(VirtualMemory, FindsTheRangeAnAddressIsIn) {
  auto* const start = static_cast<char*>(memory_.allocate(1, 5 * kMiB, Kind::managed));
  const auto inside = memory_.find(start + 5 * kMiB);
  ASSERT_TRUE(inside);
  EXPECT_EQ(inside->start, reinterpret_cast<std::uintptr_t>(start));
  EXPECT_EQ(inside->size, 6 * kMiB);
  EXPECT_EQ(inside->device, 1);
  EXPECT_EQ(inside->kind, Kind::managed);
  EXPECT_FALSE(memory_.find(start - 1) && memory_.find(start - 1)->start == inside->start);
  int on_stack = 0;
  EXPECT_FALSE(memory_.find(&on_stack));
  memory_.release(start);
  EXPECT_FALSE(memory_.find(start));
}

TEST_F(VirtualMemory, ReleasesOnlyWhatStartsThere) {
  auto* const start = static_cast<char*>(memory_.allocate(0, 2 * kMiB));
  EXPECT_FALSE(memory_.release(start + 1));
  EXPECT_TRUE(memory_.release(start));
  EXPECT_FALSE(memory_.release(start));
}

TEST_F(VirtualMemory, PinnedMemoryTakesNothingOfADevice) {
  void* const pinned = memory_.allocate_pinned(100);
  EXPECT_EQ(memory_.find(pinned)->kind, Kind::pinned);
  EXPECT_EQ(memory_.free(0), 9 * kGiB);
  EXPECT_TRUE(memory_.release(pinned));
}

TEST_F(VirtualMemory, UnpinningLeavesTheProgramItsMemory) {
  std::vector<char> own(100, 'x');
  EXPECT_TRUE(memory_.pin(own.data(), own.size()));
  EXPECT_FALSE(memory_.pin(own.data(), own.size()));
  EXPECT_EQ(memory_.find(own.data() + 50)->kind, Kind::pinned);
  EXPECT_TRUE(memory_.release(own.data()));
  EXPECT_FALSE(memory_.find(own.data()));
  EXPECT_EQ(own[99], 'x');
}

TEST_F(VirtualMemory, AddressesTakeNoMemoryUntilTheyAreMapped) {
  auto* const start = static_cast<char*>(memory_.reserve_addresses(64 * kGiB));
  ASSERT_NE(start, nullptr);
  EXPECT_EQ(memory_.free(0), 9 * kGiB);
  EXPECT_FALSE(memory_.find(start));

  ASSERT_TRUE(memory_.map(start, 20 * kMiB, 0));
  ASSERT_TRUE(memory_.map(start + 20 * kMiB, 20 * kMiB, 0));
  start[25 * kMiB] = 5;
  EXPECT_EQ(memory_.find(start + 25 * kMiB)->size, 20 * kMiB);

  ASSERT_TRUE(memory_.unmap(start, 40 * kMiB)) << "what was mapped in parts, at once";
  EXPECT_FALSE(memory_.find(start + 25 * kMiB));

  ASSERT_TRUE(memory_.map(start + 20 * kMiB, 20 * kMiB, 0));
  EXPECT_EQ(start[25 * kMiB], 0) << "what is mapped again reads as zero";
  ASSERT_TRUE(memory_.unmap(start + 20 * kMiB, 20 * kMiB));
  EXPECT_FALSE(memory_.release_addresses(start, kMiB));
  EXPECT_TRUE(memory_.release_addresses(start, 64 * kGiB));
}

TEST_F(VirtualMemory, ThreadsShareOneDevice) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 300;
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([this, index] {
      std::vector<void*> own;
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t size = static_cast<std::size_t>(1 + (round * 7 + index) % 5) * kMiB;
        if (void* const block = memory_.allocate(1, size)) {
          std::memset(block, index, 64);
          EXPECT_EQ(memory_.find(block)->device, 1);
          own.push_back(block);
        }
        if (round % 3 == 2) {
          EXPECT_EQ(*static_cast<char*>(own.back()), index) << "a block is one thread's";
          EXPECT_TRUE(memory_.release(own.back()));
          own.pop_back();
        }
      }
      for (void* const block : own) {
        EXPECT_TRUE(memory_.release(block));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(memory_.free(1), 4 * kGiB);
}

}  // namespace
}  // namespace opacus_memprof::virtual_gpu
