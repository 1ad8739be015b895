// SPDX-License-Identifier: Apache-2.0
#include "core/id_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <thread>
#include <vector>

namespace opacus_memprof {
namespace {

const void* pointer_to(std::uint64_t address) { return reinterpret_cast<const void*>(address); }

// Those of one slot, as the types of two libraries may be, and those of neighbouring ones.
TEST(IdCache, EachAddressIsLookedUpOnceHoweverManyShareASlot) {
  IdCache cache;
  std::map<std::uint64_t, int> calls;
  for (int round = 0; round < 3; ++round) {
    for (std::uint64_t i = 0; i < 200; ++i) {
      const std::uint64_t address =
          0x7f00'0000'0000 + (i % 2 == 0 ? i * 16 * IdCache::kSlots : i * 16);
      const auto id = cache.id_of(pointer_to(address), [&] {
        ++calls[address];
        return static_cast<std::uint16_t>(1000 + i);
      });
      EXPECT_EQ(id, 1000 + i);
    }
  }
  EXPECT_EQ(calls.size(), 200U);
  for (const auto& [address, count] : calls) EXPECT_EQ(count, 1) << address;
}

TEST(IdCache, WhatFindsNoPlaceIsLookedUpEachTime) {
  IdCache cache;
  for (int round = 0; round < 2; ++round) {
    for (std::uint64_t i = 0; i < IdCache::kSlots + 100; ++i) {
      const auto id = static_cast<std::uint16_t>(i);
      EXPECT_EQ(cache.id_of(pointer_to(0x1000 + 16 * i), [&] { return id; }), id);
    }
  }
}

TEST(IdCache, ThreadsAgree) {
  IdCache cache;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < 3000; ++i) {
        const std::uint64_t number = i % 300;
        const auto id = static_cast<std::uint16_t>(number);
        const std::uint64_t address = 0x1000 + number * 16 * (IdCache::kSlots / 4);
        if (cache.id_of(pointer_to(address), [&] { return id; }) != id) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace opacus_memprof
