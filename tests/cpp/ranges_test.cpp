// SPDX-License-Identifier: Apache-2.0
#include "virtual_values/ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

namespace opacus_memprof::virtual_values {
namespace {

// Memory as a test sees it, whose every byte is rubbish at first.
class RangesTest : public testing::Test {
 protected:
  static constexpr std::size_t kSize = 96;

  [[nodiscard]] Span at(std::size_t begin, std::size_t end) {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_.data());
    return {start + begin, start + end};
  }

  alignas(16) std::array<std::uint8_t, kSize> memory_ = [] {
    std::array<std::uint8_t, kSize> bytes{};
    bytes.fill(0xEE);
    return bytes;
  }();
  Ranges ranges_;
};

TEST_F(RangesTest, WhatNothingHasWrittenReadsAsZero) {
  EXPECT_EQ(ranges_.lowest(at(8, 16)), State::unwritten);
  EXPECT_EQ(ranges_.materialize(at(8, 16)), State::assumed);
  EXPECT_EQ(ranges_.lowest(at(8, 16)), State::assumed);
  EXPECT_EQ(memory_[7], 0xEE);
  EXPECT_EQ(memory_[8], 0);
  EXPECT_EQ(memory_[15], 0);
  EXPECT_EQ(memory_[16], 0xEE);
}

TEST_F(RangesTest, ABlockThatIsUsedAgainForgetsWhatWasThere) {
  ranges_.set(at(0, 32), State::known);
  EXPECT_EQ(ranges_.materialize(at(0, 32)), State::known);
  EXPECT_EQ(memory_[0], 0xEE);  // known bytes stay
  ranges_.reset(at(8, 16));
  EXPECT_EQ(ranges_.materialize(at(0, 32)), State::assumed);
  EXPECT_EQ(memory_[7], 0xEE);
  EXPECT_EQ(memory_[8], 0);
}

TEST_F(RangesTest, APatternIsWrittenWhereItIsRead) {
  ranges_.set_uniform(at(0, 64), {State::known, {.bytes = {1, 2, 3, 4}, .size = 4}});
  const auto whole = ranges_.uniform(at(8, 60));
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->state, State::known);
  EXPECT_EQ(ranges_.materialize(at(8, 12)), State::known);
  const std::size_t phase = at(0, 0).begin % 4;
  EXPECT_EQ(memory_[8], 1 + (phase + 8) % 4);
  EXPECT_EQ(memory_[12], 0xEE);
  EXPECT_FALSE(ranges_.uniform(at(8, 60)));
  EXPECT_TRUE(ranges_.uniform(at(16, 60)));
}

TEST_F(RangesTest, PiecesThatWereWrittenOneByOneAreOne) {
  for (std::size_t begin = 0; begin < kSize; begin += 8)
    ranges_.set(at(begin, begin + 8), State::known);
  EXPECT_EQ(ranges_.lowest(at(0, kSize)), State::known);
  EXPECT_EQ(ranges_.lowest(at(3, 90)), State::known);
}

// Against a model that keeps a state and a value for every byte.
TEST_F(RangesTest, AgreesWithAModelOfEveryByte) {
  std::mt19937 random(7);
  std::vector<State> states(kSize, State::unwritten);
  std::vector<std::uint8_t> values(kSize, 0);  // what each byte reads as
  std::vector<bool> written(kSize, false);     // the byte itself has this value
  for (int step = 0; step < 20'000; ++step) {
    std::size_t begin = random() % kSize;
    std::size_t end = random() % kSize;
    if (begin > end) std::swap(begin, end);
    if (begin == end) continue;
    const Span span = at(begin, end);
    const auto all = [&](State state, auto value, bool is_written) {
      for (std::size_t index = begin; index < end; ++index) {
        states[index] = state;
        values[index] = value(index);
        written[index] = is_written;
      }
    };
    const auto zero = [](std::size_t) { return std::uint8_t{0}; };
    const auto byte = static_cast<std::uint8_t>(1 + random() % 200);
    switch (random() % 5) {
      case 0:
        ranges_.reset(span);
        all(State::unwritten, zero, false);
        break;
      case 1: {
        const State state = random() % 2 != 0 ? State::known : State::assumed;
        std::fill(memory_.begin() + static_cast<std::ptrdiff_t>(begin),
                  memory_.begin() + static_cast<std::ptrdiff_t>(end), byte);
        ranges_.set(span, state);
        all(
            state, [&](std::size_t) { return byte; }, true);
        break;
      }
      case 2:
        ranges_.set_uniform(span, {State::known, {.bytes = {byte, 9}, .size = 2}});
        all(
            State::known,
            [&](std::size_t index) {
              return (span.begin - begin + index) % 2 == 0 ? byte : std::uint8_t{9};
            },
            false);
        break;
      case 3:
        ranges_.set_not_computed(span);
        all(State::assumed, zero, false);
        break;
      default: {
        State lowest = State::known;
        for (std::size_t index = begin; index < end; ++index)
          lowest = std::min(lowest, states[index]);
        EXPECT_EQ(ranges_.lowest(span), lowest);
        const auto each = ranges_.each(span, 1);
        EXPECT_TRUE(std::equal(each.begin(), each.end(),
                               states.begin() + static_cast<std::ptrdiff_t>(begin),
                               states.begin() + static_cast<std::ptrdiff_t>(end)));
        if (span.size() % 2 == 0) {
          const auto pairs = ranges_.each(span, 2);
          for (std::size_t index = 0; index < pairs.size(); ++index)
            EXPECT_EQ(pairs[index], std::min(each[2 * index], each[2 * index + 1]));
        }
        EXPECT_EQ(ranges_.materialize(span), std::max(lowest, State::assumed));
        for (std::size_t index = begin; index < end; ++index) {
          states[index] = std::max(states[index], State::assumed);
          written[index] = true;
        }
      }
    }
    for (std::size_t index = 0; index < kSize; ++index) {
      if (!written[index]) continue;
      ASSERT_EQ(memory_[index], values[index]) << "byte " << index << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace opacus_memprof::virtual_values
