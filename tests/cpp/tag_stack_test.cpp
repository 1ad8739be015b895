// SPDX-License-Identifier: Apache-2.0
#include "core/tag_stack.h"

#include <gtest/gtest.h>

#include <thread>

namespace opacus_memprof {
namespace {

constexpr auto id(Category category) { return static_cast<std::uint8_t>(category); }
constexpr auto id(Phase phase) { return static_cast<std::uint8_t>(phase); }

TEST(ThreadTags, AnInnerTagInheritsWhatItDoesNotSay) {
  ThreadTags tags;
  tags.push({.category = id(Category::noise), .module = 3});
  tags.push({.op = 9});
  EXPECT_EQ(tags.top(), (Tag{.category = id(Category::noise), .module = 3, .op = 9}));
  tags.pop();
  EXPECT_EQ(tags.top(), (Tag{.category = id(Category::noise), .module = 3}));
  tags.pop();
  EXPECT_EQ(tags.top(), Tag{});
  tags.pop();  // one too many is harmless
  EXPECT_EQ(tags.depth(), 0U);
}

TEST(ThreadTags, UnwindingLeavesTheTagOfThatDepth) {
  ThreadTags tags;
  for (std::uint16_t module = 1; module <= 5; ++module) tags.push({.module = module});
  tags.unwind(2);
  EXPECT_EQ(tags.top().module, 2);
  tags.unwind(4);  // deeper than we are: nothing to undo
  EXPECT_EQ(tags.depth(), 2U);
}

TEST(ThreadTags, NestingDeeperThanIsKeptStillReturnsToTheOutermost) {
  ThreadTags tags;
  tags.push({.module = 1});
  for (int i = 0; i < 1000; ++i) tags.push({.module = 2});
  for (int i = 0; i < 1000; ++i) tags.pop();
  EXPECT_EQ(tags.depth(), 1U);
  EXPECT_EQ(tags.top().module, 1);
}

TEST(ThreadTags, WithoutATagThePhaseDecides) {
  ThreadTags tags;
  const auto category = [&](const BackwardPosition& backward) {
    return static_cast<Category>(tags.resolve(backward).category);
  };
  EXPECT_EQ(category({}), Category::unattributed);
  tags.set_phase(Phase::forward);
  EXPECT_EQ(category({}), Category::forward_undecided);
  EXPECT_EQ(category({.task = 0, .module = 4, .op = 2}), Category::backward_temporaries);
  EXPECT_EQ(tags.resolve({.task = 0, .module = 4, .op = 2}).module, 4);
  tags.push({.category = id(Category::temp_matrices), .module = 8});
  EXPECT_EQ(category({.task = 0, .module = 4}), Category::temp_matrices);
  EXPECT_EQ(tags.resolve({.task = 0, .module = 4}).module, 8);
  EXPECT_EQ(tags.resolve({.task = 0}).phase, id(Phase::backward));
}

TEST(ThreadTags, ForwardIsOverOnceABackwardHasRun) {
  ThreadTags tags;
  tags.set_phase(Phase::forward);
  const int task = 1'000'000;
  std::thread([&] { backward_state.note(task); }).join();  // on autograd's own thread
  EXPECT_EQ(tags.phase(), Phase::idle);
  tags.set_phase(Phase::forward);
  backward_state.note(task);  // the same pass again: nothing new
  EXPECT_EQ(tags.phase(), Phase::forward);
  tags.set_phase(Phase::optimizer_step);
  backward_state.note(task + 1);
  EXPECT_EQ(tags.phase(), Phase::optimizer_step);
}

TEST(ThreadTags, GhostsSecondPassIsAPhaseOfItsOwn) {
  ThreadTags tags;
  backward_state.set_second(true);
  EXPECT_EQ(tags.resolve({.task = 1}).phase, id(Phase::second_backward));
  backward_state.set_second(false);
  EXPECT_EQ(tags.resolve({.task = 1}).phase, id(Phase::backward));
}

TEST(ThreadTags, EveryThreadHasItsOwn) {
  this_thread().push({.module = 11});
  std::thread([] { EXPECT_EQ(this_thread().depth(), 0U); }).join();
  EXPECT_EQ(this_thread().top().module, 11);
  this_thread().pop();
}

}  // namespace
}  // namespace opacus_memprof
