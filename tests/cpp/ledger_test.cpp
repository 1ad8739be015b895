// SPDX-License-Identifier: Apache-2.0
#include "core/ledger.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace opacus_memprof {
namespace {

void insert(Ledger& ledger, std::uint64_t address, std::uint64_t size) {
  const auto [block, added] = ledger.try_emplace(address);
  ASSERT_TRUE(added);
  block->set(size, 1, 2);
}

TEST(Ledger, FindsWhatWasInserted) {
  Ledger ledger;
  insert(ledger, 0x7000, 12);
  ASSERT_NE(ledger.find(0x7000), nullptr);
  EXPECT_EQ(ledger.find(0x7000)->size(), 12U);
  EXPECT_EQ(ledger.find(0x7040), nullptr);
  EXPECT_EQ(ledger.find(0), nullptr);
}

TEST(Ledger, AnErasedAddressMayComeAgain) {
  Ledger ledger;
  insert(ledger, 0x7000, 1);
  ledger.erase(ledger.find(0x7000));
  EXPECT_EQ(ledger.find(0x7000), nullptr);
  insert(ledger, 0x7000, 2);
  EXPECT_EQ(ledger.find(0x7000)->size(), 2U);
  EXPECT_EQ(ledger.size(), 1U);
}

// Long runs of neighbours, erased in the middle, are where backward-shift deletion goes wrong.
TEST(Ledger, AgreesWithAMapUnderRandomWork) {
  std::mt19937_64 random(7);
  for (const std::uint64_t stride : {64U, 512U, 4096U, 1U << 21U}) {
    Ledger ledger;
    std::map<std::uint64_t, std::uint64_t> model;
    for (int i = 0; i < 40'000; ++i) {
      const std::uint64_t address = stride * (1 + random() % 3000);
      if (const auto found = model.find(address); found != model.end()) {
        ASSERT_NE(ledger.find(address), nullptr);
        ASSERT_EQ(ledger.find(address)->size(), found->second);
        ledger.erase(ledger.find(address));
        model.erase(found);
      } else {
        ASSERT_EQ(ledger.find(address), nullptr);
        const std::uint64_t size = random() % 1'000'000;
        insert(ledger, address, size);
        model.emplace(address, size);
      }
      ASSERT_EQ(ledger.size(), model.size());
    }
    std::map<std::uint64_t, std::uint64_t> content;
    ledger.for_each([&](const Block& block) { content.emplace(block.address, block.size()); });
    EXPECT_EQ(content, model);
  }
}

}  // namespace
}  // namespace opacus_memprof
