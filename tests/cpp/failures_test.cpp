// SPDX-License-Identifier: Apache-2.0
#include "core/failures.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/recorder.h"

namespace opacus_memprof {
namespace {

constexpr Device kGpu = 1;

Tag tag_of(Category category, std::uint16_t module, Phase phase) {
  return {.category = static_cast<std::uint8_t>(category),
          .phase = static_cast<std::uint8_t>(phase),
          .module = module,
          .op = 3};
}

TEST(Failures, TakeStockOfTheDevice) {
  Recorder recorder;
  const Tag noise = tag_of(Category::noise, 7, Phase::noise);
  recorder.on_alloc(0x1000, 100, kGpu, 0, noise);
  recorder.on_alloc(0x2000, 50, kGpu, 0, noise);
  recorder.end_step(true);
  recorder.on_alloc(0x3000, 400, kGpu, 0, noise);
  recorder.on_alloc(0x4000, 30, kGpu, 0, tag_of(Category::inputs, 0, Phase::idle));
  recorder.on_alloc(0x5000, 900, 0, 0, noise);  // of another device
  recorder.on_free(0x4000, Phase::idle);
  recorder.on_oom(12345, kGpu, tag_of(Category::gradients, 9, Phase::backward));

  const auto failures = recorder.failures();
  ASSERT_EQ(failures.size(), 1U);
  const Failure& failure = failures.front();
  EXPECT_EQ(failure.requested, 12345U);
  EXPECT_EQ(failure.step, 1U);
  EXPECT_EQ(failure.logical_step, 1U);
  EXPECT_EQ(failure.device, kGpu);
  EXPECT_EQ(failure.tag, tag_of(Category::gradients, 9, Phase::backward));
  EXPECT_EQ(failure.upstream.reserved, -1);
  ASSERT_EQ(failure.holdings.size(), 2U);  // by step
  EXPECT_EQ(failure.holdings[0].bytes, 400U);
  EXPECT_EQ(failure.holdings[0].step, 1U);
  EXPECT_EQ(failure.holdings[1].bytes, 150U);
  EXPECT_EQ(failure.holdings[1].blocks, 2U);
  EXPECT_EQ(failure.holdings[1].largest, 100U);
  EXPECT_EQ(failure.holdings[1].module, 7);
  EXPECT_EQ(failure.holdings[1].op, 3);
  EXPECT_EQ(failure.holdings[1].category, static_cast<std::uint8_t>(Category::noise));
  EXPECT_EQ(failure.holdings[1].phase, static_cast<std::uint8_t>(Phase::noise));
}

TEST(Failures, OnlyTheNewestAreKept) {
  Recorder recorder;
  for (std::uint64_t size = 0; size < FailureLog::kMaxFailures + 5; ++size) {
    EXPECT_EQ(recorder.on_oom(size, kGpu, {}), size);
  }
  recorder.note_upstream_at_failure(FailureLog::kMaxFailures, {.reserved = 77});
  recorder.note_upstream_at_failure(0, {.reserved = 88});  // forgotten already
  const auto failures = recorder.failures();
  ASSERT_EQ(failures.size(), FailureLog::kMaxFailures);
  EXPECT_EQ(failures.front().number, 5U);
  EXPECT_EQ(failures.back().number, FailureLog::kMaxFailures + 4);
  for (const Failure& failure : failures) {
    EXPECT_EQ(failure.upstream.reserved, failure.number == FailureLog::kMaxFailures ? 77 : -1);
  }
}

TEST(Failures, OfManyThreadsWhileBlocksComeAndGo) {
  Recorder recorder;
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&recorder, thread] {
      for (std::uint64_t i = 0; i < 200; ++i) {
        const std::uint64_t address = (thread << 20U | i << 8U) + 0x1000;
        recorder.on_alloc(address, 64, kGpu, 0, {.category = 0, .phase = 0, .module = 0, .op = 0});
        if (i % 20 == 0) {
          recorder.on_oom(i, kGpu, {});
          EXPECT_LE(recorder.failures().size(), FailureLog::kMaxFailures);
        }
        recorder.on_free(address, Phase::idle);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Failure& failure : recorder.failures()) {
    for (const Holding& holding : failure.holdings) EXPECT_EQ(holding.bytes, 64 * holding.blocks);
  }
}

}  // namespace
}  // namespace opacus_memprof
