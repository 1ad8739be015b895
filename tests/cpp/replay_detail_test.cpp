// SPDX-License-Identifier: Apache-2.0
// What only a walk over all live blocks can tell: shares by op, stream and thread and the newest
// blocks at the peak, and the residue at the end of the last step.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "core/replay.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using enum EventKind;

std::int64_t at(const CategoryBytes& bytes, Category category) {
  return bytes[static_cast<std::size_t>(category)];
}

TEST(ReplayDetail, the_peak_is_split_by_op_stream_and_thread_of_birth) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 7, .category = Category::noise, .op = 3});
  file.add({.kind = alloc, .address = 128, .size = 20, .op = 3, .stream = 2, .thread = 1});
  file.add({.kind = alloc, .address = 192, .size = 100, .op = 9, .stream = 2, .thread = 255});
  file.add({.kind = retag, .address = 192, .category = Category::gradients});
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.ops.size(), 2U);
  EXPECT_EQ(device.ops[0].id, 3);
  EXPECT_EQ(at(device.ops[0].categories, Category::noise), 7);
  EXPECT_EQ(at(device.ops[0].categories, Category::unattributed), 20);
  EXPECT_EQ(device.ops[1].id, 9);
  EXPECT_EQ(at(device.ops[1].categories, Category::gradients), 100);
  ASSERT_EQ(device.streams.size(), 2U);
  EXPECT_EQ(at(device.streams[0].categories, Category::noise), 7);
  EXPECT_EQ(device.streams[1].id, 2);
  EXPECT_EQ(at(device.streams[1].categories, Category::unattributed), 20);
  EXPECT_EQ(at(device.streams[1].categories, Category::gradients), 100);
  ASSERT_EQ(device.threads.size(), 3U);
  EXPECT_EQ(device.threads[2].id, 255);
  EXPECT_EQ(at(device.threads[2].categories, Category::gradients), 100);
}

TEST(ReplayDetail, a_block_of_nobodys_code_belongs_to_its_later_owner) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 7});
  file.add({.kind = alloc, .address = 128, .size = 20, .module = 2});
  file.add({.kind = alloc, .address = 192, .size = 300});
  file.add({.kind = free, .address = 192, .size = 300});  // the peak is before it
  file.add({.kind = retag, .address = 64, .category = Category::gradients, .module = 4});
  file.add({.kind = retag,
            .address = 64,
            .category = Category::gradients,
            .module = 5,
            .op = static_cast<std::uint16_t>(Category::gradients)});
  file.add({.kind = retag, .address = 128, .category = Category::gradients, .module = 5});
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.modules.size(), 3U);
  EXPECT_EQ(device.modules[0].id, 0);
  EXPECT_EQ(at(device.modules[0].categories, Category::unattributed), 300);
  EXPECT_EQ(device.modules[1].id, 2);
  EXPECT_EQ(at(device.modules[1].categories, Category::gradients), 20);
  EXPECT_EQ(device.modules[2].id, 4);
  EXPECT_EQ(at(device.modules[2].categories, Category::gradients), 7);
}

TEST(ReplayDetail, the_newest_blocks_are_those_born_last_that_live_at_the_peak) {
  EventFileBuilder file;
  for (std::uint64_t i = 1; i <= 15; ++i) {
    file.add({.kind = alloc, .address = 64 * i, .size = i});
  }
  file.add({.kind = free, .address = 64 * 14, .size = 14});
  file.add({.kind = alloc, .address = 64 * 14, .size = 1000, .op = 5});
  const auto device = replay(file.write()).devices.at(0);
  ASSERT_EQ(device.newest_blocks.size(), 10U);
  EXPECT_EQ(device.newest_blocks[0].bytes, 1000U);
  EXPECT_EQ(device.newest_blocks[0].op, 5);
  EXPECT_EQ(device.newest_blocks[1].bytes, 15U);
  EXPECT_EQ(device.newest_blocks[2].bytes, 13U);
  EXPECT_EQ(device.newest_blocks[9].bytes, 6U);
}

TEST(ReplayDetail, of_thousands_of_blocks_those_that_a_sort_puts_first) {
  std::mt19937_64 random(3);
  EventFileBuilder file;
  std::vector<std::uint64_t> sizes;
  for (std::uint32_t i = 0; i < 5000; ++i) {
    sizes.push_back(1 + random() % 1000);
    file.add({.kind = alloc, .address = 512 * (i + 1), .size = sizes.back(), .step = i});
  }
  const auto device = replay(file.write()).devices.at(0);
  std::vector<std::uint32_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return sizes[a] > sizes[b]; });
  ASSERT_EQ(device.largest_blocks.size(), 50U);
  for (std::size_t i = 0; i < 50; ++i) EXPECT_EQ(device.largest_blocks[i].step, order[i]);
  ASSERT_EQ(device.newest_blocks.size(), 10U);
  for (std::size_t i = 0; i < 10; ++i) EXPECT_EQ(device.newest_blocks[i].step, 4999 - i);
}

// Ten steps; each keeps what `keep` says of the step.
template <typename Keep>
ReplayResult::Device ten_steps(Keep keep) {
  EventFileBuilder file;
  for (std::uint32_t step = 0; step < 10; ++step) {
    keep(file, step);
    file.add({.kind = EventKind::step, .size = step + 1, .step = step + 1, .device = 0});
  }
  file.add({.kind = alloc, .address = 1 << 20, .size = 1, .step = 10});
  return replay(file.write()).devices.at(0);
}

TEST(ReplayResidue, blocks_of_the_middle_steps_that_outlive_the_last_step) {
  const auto device = ten_steps([](EventFileBuilder& file, std::uint32_t step) {
    file.add(
        {.kind = alloc, .address = 64 * (step + 1), .size = 10 + step, .step = step, .module = 4});
    file.add({.kind = alloc, .address = 1 << 16, .size = 500, .step = step});
    file.add({.kind = free, .address = 1 << 16, .size = 500, .step = step});
  });
  EXPECT_EQ(device.last_step_end.step, 10U);
  EXPECT_EQ(device.last_step_end.bytes, 145);
  EXPECT_EQ(at(device.last_step_end.categories, Category::unattributed), 145);
  ASSERT_EQ(device.residue.size(), 1U);
  const auto& residue = device.residue[0];
  EXPECT_EQ(residue.module, 4);
  EXPECT_EQ(residue.blocks, 6U);  // of steps 2 to 7
  EXPECT_EQ(residue.bytes, 12 + 13 + 14 + 15 + 16 + 17);
  EXPECT_EQ(residue.steps, 6U);
  EXPECT_EQ(residue.first_step, 2U);
  EXPECT_EQ(residue.last_step, 7U);
}

TEST(ReplayResidue, tells_where_blocks_were_made_though_they_moved_on) {
  const auto device = ten_steps([](EventFileBuilder& file, std::uint32_t step) {
    const auto phase = step % 2 == 0 ? Phase::forward : Phase::backward;
    const auto op = static_cast<std::uint16_t>(step % 2 == 0 ? 6 : 7);
    const std::uint64_t address = 64 * (step + 1);
    file.add(
        {.kind = alloc, .address = address, .size = 1, .phase = phase, .step = step, .op = op});
    file.add({.kind = retag, .address = address, .category = Category::noise, .step = step});
  });
  ASSERT_EQ(device.residue.size(), 2U);
  EXPECT_EQ(device.residue[0].phase, static_cast<std::uint8_t>(Phase::forward));
  EXPECT_EQ(device.residue[0].op, 6);
  EXPECT_EQ(device.residue[1].phase, static_cast<std::uint8_t>(Phase::backward));
  EXPECT_EQ(device.residue[1].op, 7);
  for (const auto& residue : device.residue) {
    EXPECT_EQ(residue.category, static_cast<std::uint8_t>(Category::noise));
    EXPECT_EQ(residue.bytes, 3);
  }
}

TEST(ReplayResidue, is_by_module_and_category_and_counts_each_step_once) {
  const auto device = ten_steps([](EventFileBuilder& file, std::uint32_t step) {
    if (step != 3 && step != 5) return;
    for (std::uint64_t i = 0; i < 2; ++i) {
      file.add(
          {.kind = alloc, .address = 64 * (2 * step + i), .size = 8, .step = step, .module = 1});
      file.add({.kind = retag,
                .address = 64 * (2 * step + i),
                .category = i == 0 ? Category::noise : Category::unattributed,
                .step = step,
                .module = 1});
    }
  });
  ASSERT_EQ(device.residue.size(), 2U);
  for (const auto& residue : device.residue) {
    EXPECT_EQ(residue.bytes, 16);
    EXPECT_EQ(residue.blocks, 2U);
    EXPECT_EQ(residue.steps, 2U);
    EXPECT_EQ(residue.first_step, 3U);
    EXPECT_EQ(residue.last_step, 5U);
  }
}

TEST(ReplayResidue, leaves_out_what_warm_up_and_the_last_steps_made_and_what_was_there_before) {
  const auto device = ten_steps([](EventFileBuilder& file, std::uint32_t step) {
    if (step == 0) file.add({.kind = seed, .address = 1 << 14, .size = 9, .step = 5});
    if (step < 2 || step > 7)
      file.add({.kind = alloc, .address = 64 * (step + 1), .size = 10, .step = step});
  });
  EXPECT_TRUE(device.residue.empty());
}

TEST(ReplayResidue, without_a_step_there_is_none) {
  EventFileBuilder file;
  file.add({.kind = alloc, .address = 64, .size = 10, .step = 5});
  const auto device = replay(file.write()).devices.at(0);
  EXPECT_EQ(device.last_step_end.event, ReplayResult::kNever);
  EXPECT_TRUE(device.residue.empty());
}

}  // namespace
}  // namespace opacus_memprof
