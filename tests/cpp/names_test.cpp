// SPDX-License-Identifier: Apache-2.0
#include "core/names.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "core/vocabulary.h"

namespace opacus_memprof {
namespace {

using Kind = Names::Kind;

TEST(Names, ANameKeepsItsId) {
  Names names;
  const auto id = names.intern(Kind::module, "blocks.0");
  EXPECT_EQ(names.intern(Kind::module, "blocks.0"), id);
  EXPECT_NE(names.intern(Kind::module, "blocks.1"), id);
  EXPECT_EQ(names.list(Kind::module)[id], "blocks.0");
}

TEST(Names, BuiltInCategoriesHaveTheirNumbers) {
  Names names;
  for (std::size_t i = 0; i < kBuiltinCategories; ++i) {
    EXPECT_EQ(names.intern(Kind::category, kCategoryNames[i]), i);
  }
  EXPECT_EQ(names.intern(Kind::category, "mine"), kBuiltinCategories);
}

TEST(Names, NoModuleIsZero) {
  Names names;
  EXPECT_EQ(names.intern(Kind::module, ""), 0);
  EXPECT_EQ(names.intern(Kind::op, ""), 0);
  EXPECT_EQ(names.intern(Kind::stream, ""), 0);
}

TEST(Names, AFullListMergesAndSaysSo) {
  Names names;
  for (std::size_t i = kBuiltinCategories; i < kMaxCategories - 1; ++i) {
    EXPECT_EQ(names.intern_or_throw(Kind::category, "c" + std::to_string(i)), i);
  }
  EXPECT_EQ(names.intern(Kind::category, "one too many"), kMaxCategories - 1);
  EXPECT_EQ(names.intern(Kind::category, "and another"), kMaxCategories - 1);
  EXPECT_EQ(names.list(Kind::category).size(), kMaxCategories);
  EXPECT_EQ(names.list(Kind::category).back(), "(other)");
  EXPECT_THROW(names.intern_or_throw(Kind::category, "a third"), std::out_of_range);
  EXPECT_EQ(names.intern_or_throw(Kind::category, "noise"),
            static_cast<std::uint16_t>(Category::noise));
}

TEST(Names, AModuleHasTheComponentThatWasSetLast) {
  Names names;
  const auto head = names.intern(Kind::module, "h");
  names.intern(Kind::module, "b.0");
  names.set_component(head, "attention");
  const auto version = names.version();
  names.set_component(head, "head");
  EXPECT_EQ(names.components(), (std::vector<std::string>{"", "head", ""}));
  EXPECT_GT(names.version(), version);  // so that meta.json is written again
  names.set_component(head, "");
  EXPECT_EQ(names.components()[head], "");
}

TEST(Names, AnAdditionChangesTheVersion) {
  Names names;
  const auto before = names.version();
  names.intern(Kind::op, "AddmmBackward0");
  EXPECT_GT(names.version(), before);
  const auto after = names.version();
  names.intern(Kind::op, "AddmmBackward0");
  EXPECT_EQ(names.version(), after);
}

TEST(Names, ALineIsAnOp) {
  Names names;
  const auto other = names.intern(Kind::op, "clip");
  const auto version = names.version();
  const auto line = names.intern_line("a.py:4 in f < a.py:9", "a.py:4 in f");
  EXPECT_GT(names.version(), version);  // so that meta.json is written again
  EXPECT_EQ(names.intern_line("a.py:4 in f < a.py:9", "a.py:4 in f"), line);
  EXPECT_NE(names.intern_line("a.py:4 in f < a.py:11", "a.py:4 in f"), line);
  EXPECT_EQ(names.name(Kind::op, line), "a.py:4 in f < a.py:9");
  EXPECT_EQ(names.lines()[line], "a.py:4 in f");
  EXPECT_EQ(names.lines()[other], "");
  EXPECT_EQ(names.lines().size(), names.size(Kind::op));
}

TEST(Names, LinesLeaveRoomForOtherOps) {
  Names names;
  std::uint16_t id = 1;
  for (int i = 0; id != 0; ++i) {
    const std::string line = "a.py:" + std::to_string(i);
    id = names.intern_line(line, line);
    ASSERT_LT(i, 0xFFFF);
  }
  EXPECT_NE(names.intern(Kind::op, "clip"), 0);
  EXPECT_EQ(names.list(Kind::op).back(), "clip");
}

TEST(Names, WhatIsNotUtf8IsReplaced) {
  Names names;
  const auto kept = [&](std::string_view name) {
    const auto id = names.intern(Kind::thread, name);
    return names.list(Kind::thread)[id];
  };
  const std::string whole = "a\xC3\xBC\xE2\x82\xAC\xF0\x9F\x98\x80z";  // one to four bytes
  EXPECT_EQ(kept(whole), whole);
  EXPECT_EQ(kept("a\xFFz"), "a\xEF\xBF\xBDz");
  EXPECT_EQ(kept("a\x80"), "a\xEF\xBF\xBD");
  EXPECT_EQ(kept("a\xE2\x82z"), "a\xEF\xBF\xBDz");
  // Longer than it need be, half of a pair, beyond the last one: one mark a byte.
  EXPECT_EQ(kept("\xC0\xAF").size(), 6U);
  EXPECT_EQ(kept("\xED\xA0\x80").size(), 9U);
  EXPECT_EQ(kept("\xF4\x90\x80\x80").size(), 12U);
}

TEST(Names, ACharacterThatWasCutOffAtTheEndIsLeftOut) {
  Names names;
  const auto id = names.intern(Kind::thread, "worker");
  for (const auto* cut : {"worker\xC3", "worker\xE2\x82", "worker\xF0\x9F\x98"}) {
    EXPECT_EQ(names.intern(Kind::thread, cut), id);
  }
}

TEST(Names, APhaseIsItsIndexInTheVocabulary) {
  EXPECT_EQ(phase_id("idle"), 0);
  EXPECT_EQ(phase_id("zero_grad"), static_cast<std::uint8_t>(Phase::zero_grad));
  EXPECT_THROW(phase_id(""), std::invalid_argument);
  EXPECT_THROW(phase_id("forwards"), std::invalid_argument);
}

}  // namespace
}  // namespace opacus_memprof
