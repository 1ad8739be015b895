// SPDX-License-Identifier: Apache-2.0
#include "core/replay_table.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>
#include <vector>

namespace opacus_memprof {
namespace {

ReplayBlock block(std::uint64_t key, std::uint64_t birth) {
  ReplayBlock made;
  made.key = key;
  made.birth = birth;
  return made;
}

// Full to three quarters and churned, so that runs of neighbours form, wrap around and are closed.
TEST(ReplayTable, agrees_with_a_map) {
  std::mt19937_64 random(1);
  ReplayTable table;
  std::unordered_map<std::uint64_t, std::uint64_t> model;
  std::vector<std::uint64_t> keys;
  for (std::uint64_t step = 0; step < 100'000; ++step) {
    const bool grow = keys.size() < 3000 || (keys.size() < 20'000 && step > 60'000);
    if (grow || random() % 2 == 0) {
      const std::uint64_t key = (random() % 3) << 48 | (random() % 40'000) * 512;
      if (table.find(key) != nullptr) continue;
      EXPECT_EQ(table.insert(block(key, step))->birth, step);
      model[key] = step;
      keys.push_back(key);
    } else {
      std::swap(keys[random() % keys.size()], keys.back());
      ReplayBlock* found = table.find(keys.back());
      ASSERT_NE(found, nullptr);
      table.erase(found);
      EXPECT_EQ(table.find(keys.back()), nullptr);
      model.erase(keys.back());
      keys.pop_back();
    }
    if (step % 1000 == 0) {
      for (const auto& [key, birth] : model) {
        ReplayBlock* found = table.find(key);
        ASSERT_NE(found, nullptr);
        EXPECT_EQ(found->birth, birth);
      }
    }
  }
  std::size_t walked = 0;
  table.for_each([&](const ReplayBlock& one) {
    ++walked;
    EXPECT_EQ(model.at(one.key), one.birth);
  });
  EXPECT_EQ(walked, model.size());
}

TEST(ReplayTable, the_highest_device_and_address_are_a_key) {
  Event event{};
  event.device = 255;
  event.address = (std::uint64_t{1} << 48) - 1;
  ReplayTable table;
  EXPECT_EQ(table.find(ReplayTable::key(event)), nullptr);
  table.insert(block(ReplayTable::key(event), 1));
  EXPECT_EQ(table.find(ReplayTable::key(event))->device(), 255);
}

}  // namespace
}  // namespace opacus_memprof
