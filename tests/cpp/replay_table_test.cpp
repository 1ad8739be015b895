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

// So many that the index has some pairs with the same 32 bits of hash.
TEST(ReplayTable, keys_with_the_same_hash_are_told_apart) {
  std::mt19937_64 random(2);
  ReplayTable table;
  std::vector<ReplayBlock*> blocks;
  for (std::uint64_t birth = 0; birth < 400'000; ++birth) {
    const std::uint64_t key = (random() >> 17) * 512;
    ASSERT_EQ(table.find(key), nullptr);
    blocks.push_back(table.insert(block(key, birth)));
  }
  for (std::uint64_t birth = 0; birth < blocks.size(); birth += 2) table.erase(blocks[birth]);
  for (std::uint64_t birth = 1; birth < blocks.size(); birth += 2) {
    ASSERT_EQ(blocks[birth]->birth, birth);
    ASSERT_EQ(table.find(blocks[birth]->key), blocks[birth]);
  }
}

TEST(ReplayTable, cleared_it_is_as_new) {
  ReplayTable table;
  for (std::uint64_t key = 1; key <= 5000; ++key) table.insert(block(key * 512, key));
  table.erase(table.find(512));
  table.clear();
  table.for_each([](const ReplayBlock&) { ADD_FAILURE() << "a block in an empty table"; });
  EXPECT_EQ(table.find(1024), nullptr);
  for (std::uint64_t key = 1; key <= 5000; ++key) table.insert(block(key * 512, key + 1));
  std::uint64_t born = 2;
  table.for_each([&](const ReplayBlock& one) { EXPECT_EQ(one.birth, born++); });
  EXPECT_EQ(born, 5002U);
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
