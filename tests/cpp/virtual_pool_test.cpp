// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "virtual_gpu/machine/pool.h"

namespace opacus_memprof::virtual_gpu {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20U;

class VirtualPool : public ::testing::Test {
 protected:
  VirtualPool() : pool_(memory_, 0) { memory_.add_device(1024 * kMiB, 0); }
  Memory memory_;
  Pool pool_;
};

TEST_F(VirtualPool, TakesWholeChunksOfTheDevice) {
  void* const small = pool_.allocate(1);
  EXPECT_EQ(pool_.used().current, 512U);
  EXPECT_EQ(pool_.reserved().current, 32 * kMiB);
  EXPECT_EQ(memory_.free(0), (1024 - 32) * kMiB);
  void* const large = pool_.allocate(33 * kMiB);
  EXPECT_EQ(pool_.reserved().current, (32 + 64) * kMiB);
  EXPECT_TRUE(pool_.release(small));
  EXPECT_TRUE(pool_.release(large));
  EXPECT_EQ(pool_.used().current, 0U);
  EXPECT_EQ(pool_.used().high, 33 * kMiB + 512);
  EXPECT_EQ(memory_.free(0), (1024 - 96) * kMiB) << "a pool keeps what it has";
}

TEST_F(VirtualPool, GivesBackWhatNothingIsIn) {
  void* const kept = pool_.allocate(kMiB);
  void* const freed = pool_.allocate(40 * kMiB);
  pool_.release(freed);
  pool_.trim(0);
  EXPECT_EQ(pool_.reserved().current, 32 * kMiB);
  EXPECT_EQ(memory_.free(0), (1024 - 32) * kMiB);
  pool_.release(kept);
  pool_.trim(32 * kMiB);
  EXPECT_EQ(pool_.reserved().current, 32 * kMiB) << "as much may stay";
  pool_.trim(0);
  EXPECT_EQ(memory_.free(0), 1024 * kMiB);
}

TEST_F(VirtualPool, UsesFreedMemoryAgainWhateverTheOrder) {
  std::vector<void*> blocks;
  for (int index = 0; index < 32; ++index) {
    blocks.push_back(pool_.allocate(kMiB));
  }
  EXPECT_EQ(pool_.reserved().current, 32 * kMiB);
  for (const int first : {1, 0}) {  // every second one, then those between
    for (std::size_t index = static_cast<std::size_t>(first); index < blocks.size(); index += 2) {
      EXPECT_TRUE(pool_.release(blocks[index]));
    }
  }
  void* const whole = pool_.allocate(32 * kMiB);
  EXPECT_EQ(pool_.reserved().current, 32 * kMiB) << "neighbours that are free are one range";
  pool_.release(whole);
}

TEST_F(VirtualPool, RangesNeverSpanTwoChunks) {
  std::vector<void*> chunks;
  for (int index = 0; index < 4; ++index) {
    chunks.push_back(pool_.allocate(32 * kMiB));
  }
  for (void* const chunk : chunks) {
    pool_.release(chunk);
  }
  void* const larger = pool_.allocate(64 * kMiB);
  EXPECT_EQ(pool_.reserved().current, (4 * 32 + 64) * kMiB);
  pool_.release(larger);
  pool_.trim(0);
  EXPECT_EQ(memory_.free(0), 1024 * kMiB);
}

TEST_F(VirtualPool, IsFullWithTheDevice) {
  void* const most = pool_.allocate(1000 * kMiB);
  ASSERT_NE(most, nullptr);
  EXPECT_EQ(pool_.allocate(100 * kMiB), nullptr);
  EXPECT_EQ(pool_.allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(pool_.used().current, 1000 * kMiB);
  pool_.release(most);
}

TEST_F(VirtualPool, KnowsOnlyWhatItGaveOut) {
  int other = 0;
  EXPECT_FALSE(pool_.release(&other));
  void* const block = pool_.allocate(100);
  EXPECT_TRUE(pool_.release(block));
  EXPECT_FALSE(pool_.release(block));
}

TEST_F(VirtualPool, BlocksOfThreadsDoNotOverlap) {
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < 4; ++index) {
    threads.emplace_back([this, index] {
      std::mt19937 random(index);
      std::vector<std::pair<unsigned char*, std::size_t>> own;
      for (int round = 0; round < 400; ++round) {
        if (own.size() < 20) {
          const std::size_t size = 1 + random() % 10000;
          auto* const block = static_cast<unsigned char*>(pool_.allocate(size));
          ASSERT_NE(block, nullptr);
          std::memset(block, static_cast<int>(index), size);
          own.emplace_back(block, size);
        } else {
          std::swap(own[random() % own.size()], own.back());
          const auto [block, size] = own.back();
          EXPECT_EQ(block[0], index);
          EXPECT_EQ(block[size - 1], index);
          EXPECT_TRUE(pool_.release(block));
          own.pop_back();
        }
      }
      for (const auto& [block, size] : own) {
        pool_.release(block);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(pool_.used().current, 0U);
  pool_.trim(0);
  EXPECT_EQ(memory_.free(0), 1024 * kMiB);
}

}  // namespace
}  // namespace opacus_memprof::virtual_gpu
