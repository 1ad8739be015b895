// SPDX-License-Identifier: Apache-2.0
#include "core/recorder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/event_reader.h"
#include "core/names.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

constexpr Device kGpu = 1;
constexpr auto id(Category category) { return static_cast<std::uint8_t>(category); }

Tag tag_of(Category category, std::uint16_t module = 0) {
  return {.category = id(category), .phase = 0, .module = module, .op = 0};
}

std::vector<Event> events_in(const std::string& path) {
  std::vector<Event> result;
  EventReader reader(path);
  while (reader.next()) {
    result.insert(result.end(), reader.records().begin(), reader.records().end());
  }
  return result;
}

std::int64_t live(Recorder& recorder, Category category) {
  for (const auto& state : recorder.snapshot("look").devices) {
    if (state.device == kGpu) return state.categories[id(category)];
  }
  return 0;
}

std::int64_t total(Recorder& recorder) {
  for (const auto& state : recorder.snapshot("look").devices) {
    if (state.device == kGpu) return state.requested;
  }
  return 0;
}

Peak peak_of(Recorder& recorder) {
  recorder.close_peak(kGpu);
  for (const auto& peak : recorder.peaks()) {
    if (peak.device == kGpu) return peak;
  }
  return {};
}

TEST(Recorder, StateIsTheCountersNow) {
  Recorder recorder;
  EXPECT_TRUE(recorder.state().devices.empty());
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::noise));
  Tag backward = tag_of(Category::gradients);
  backward.phase = static_cast<std::uint8_t>(Phase::backward);
  recorder.on_alloc(0x2000, 30, kGpu, 0, backward);
  recorder.on_free(0x1000, Phase::idle);
  recorder.end_step(true);
  const Recorder::State state = recorder.state();
  ASSERT_EQ(state.devices.size(), 1U);
  EXPECT_EQ(state.devices[0].requested, 30);
  EXPECT_EQ(state.devices[0].highest, 130);
  EXPECT_EQ(state.devices[0].phase, static_cast<std::uint8_t>(Phase::backward));
  EXPECT_EQ(state.devices[0].categories[id(Category::gradients)], 30);
  EXPECT_EQ(state.step, 1U);
  EXPECT_EQ(state.logical_step, 1U);
  EXPECT_EQ(recorder.snapshot("first").index, 0U);  // a state is none
}

TEST(Recorder, CountsByCategory) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::noise));
  recorder.on_alloc(0x2000, 30, kGpu, 0, tag_of(Category::gradients));
  EXPECT_EQ(live(recorder, Category::noise), 100);
  EXPECT_EQ(total(recorder), 130);
  recorder.on_free(0x1000, Phase::idle);
  EXPECT_FALSE(recorder.has_block(0x1000));
  recorder.on_free(0x1000, Phase::idle);  // once more: nobody's
  EXPECT_EQ(live(recorder, Category::noise), 0);
  EXPECT_EQ(total(recorder), 30);
}

TEST(Recorder, RetaggingMovesBytes) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::backward_temporaries));
  EXPECT_EQ(recorder.retag(0x1000, id(Category::gradients), 5), 100U);
  EXPECT_EQ(recorder.retag(0x1000, id(Category::gradients), 5), 0U);  // nothing changes
  EXPECT_EQ(recorder.retag(0x9000, id(Category::gradients), 5), 0U);  // no such block
  EXPECT_EQ(recorder.retag(0x1000, id(Category::inputs), kKeep16,
                           std::uint64_t{1} << id(Category::unattributed)),
            0U);  // not the expected category
  EXPECT_EQ(live(recorder, Category::gradients), 100);
  EXPECT_EQ(recorder.live_blocks().at(0).module, 5);
  EXPECT_EQ(total(recorder), 100);
}

TEST(Recorder, ThePeakIsTheMomentBeforeTheFirstFreeAfterTheMaximum) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::noise));
  recorder.on_alloc(0x2000, 50, kGpu, 0, tag_of(Category::temp_matrices));
  recorder.retag(0x2000, id(Category::per_sample_gradients), kKeep16);
  const PeakId ended = recorder.on_free(0x1000, Phase::idle);
  EXPECT_EQ(device_of(ended), kGpu);
  recorder.note_upstream_at_peak(ended, 150, 1024, 4096);
  EXPECT_EQ(recorder.on_free(0x2000, Phase::idle), kNoPeak);
  recorder.on_alloc(0x3000, 150, kGpu, 0, tag_of(Category::gradients));  // as high, not higher
  const Peak peak = peak_of(recorder);
  EXPECT_EQ(peak.requested, 150);
  EXPECT_EQ(peak.categories[id(Category::noise)], 100);
  EXPECT_EQ(peak.categories[id(Category::per_sample_gradients)], 50);
  EXPECT_EQ(peak.categories[id(Category::temp_matrices)], 0);
  EXPECT_EQ(peak.upstream_allocated, 1024);
  recorder.reset_peaks();
  EXPECT_EQ(peak_of(recorder).categories[id(Category::gradients)], 150);
}

// As where one thread ends a peak, and others make and end a higher one before upstream has told it
// its numbers.
TEST(Recorder, WhatUpstreamCountedAtAPeakIsNotNotedForALaterOne) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::gradients));
  const PeakId first = recorder.on_free(0x1000, Phase::idle);
  recorder.on_alloc(0x2000, 300, kGpu, 0, tag_of(Category::gradients));
  const PeakId second = recorder.on_free(0x2000, Phase::idle);
  recorder.note_upstream_at_peak(second, 300, 512, 2048);
  recorder.note_upstream_at_peak(first, 0, 0, 2048);
  const auto peak = recorder.peaks().at(0);
  EXPECT_EQ(peak.requested, 300);
  EXPECT_EQ(peak.upstream_requested, 300);
  EXPECT_EQ(peak.upstream_allocated, 512);
}

TEST(Recorder, CapturesNestAndReturnTheBlockToItsCategory) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::forward_undecided));
  const BlockId first = recorder.capture(0x1000);
  const BlockId second = recorder.capture(0x1000);
  EXPECT_EQ(live(recorder, Category::activation_hooks_shared), 100);
  recorder.settle(first, 2);  // two captures, and nobody else
  EXPECT_EQ(live(recorder, Category::activation_hooks_opacus_only), 100);
  recorder.settle(first, 3);
  EXPECT_EQ(live(recorder, Category::activation_hooks_shared), 100);
  recorder.release(first);
  EXPECT_EQ(live(recorder, Category::activation_hooks_shared), 100);
  recorder.release(second);
  EXPECT_EQ(live(recorder, Category::forward_undecided), 100);
}

TEST(Recorder, OnlyWhatForwardMadeIsACapturedActivation) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::inputs));
  EXPECT_EQ(recorder.capture(0x1000).serial, 0U);
  EXPECT_EQ(live(recorder, Category::inputs), 100);
}

TEST(Recorder, WhatCheckpointingRecomputesInBackwardCanBeCaptured) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::backward_temporaries));
  const BlockId captured = recorder.capture(0x1000);
  EXPECT_EQ(live(recorder, Category::activation_hooks_shared), 100);
  recorder.release(captured);
  EXPECT_EQ(live(recorder, Category::backward_temporaries), 100);
}

TEST(Recorder, ACaptureDoesNotOutliveItsBlock) {
  Recorder recorder;
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::forward_undecided));
  const BlockId captured = recorder.capture(0x1000);
  recorder.on_free(0x1000, Phase::backward);
  recorder.on_alloc(0x1000, 40, kGpu, 0, tag_of(Category::noise));  // the address again
  recorder.settle(captured, 1);
  recorder.release(captured);
  EXPECT_EQ(live(recorder, Category::noise), 40);
  EXPECT_EQ(total(recorder), 40);
}

TEST(Recorder, ASeededBlockThatWasFreedUnseenGivesWayToTheNextOneThere) {
  Recorder recorder;
  recorder.seed(0x1000, 100, kGpu, 0);
  recorder.seed(0x1000, 100, kGpu, 0);  // again: known
  EXPECT_TRUE(recorder.live_blocks().at(0).seeded);
  recorder.on_alloc(0x1000, 30, kGpu, 0, tag_of(Category::noise));
  EXPECT_EQ(total(recorder), 30);
  EXPECT_FALSE(recorder.live_blocks().at(0).seeded);
}

TEST(Recorder, WhatIsForgottenIsTheBlockThatWasMeant) {
  Recorder recorder;
  recorder.seed(0x1000, 100, kGpu, 0);
  const BlockId seeded{.address = 0x1000, .serial = recorder.live_blocks().at(0).serial};
  recorder.on_alloc(0x1000, 30, kGpu, 0, tag_of(Category::noise));
  recorder.forget(seeded, Phase::idle);
  EXPECT_EQ(total(recorder), 30);
  recorder.forget({.address = 0x1000, .serial = recorder.live_blocks().at(0).serial}, Phase::idle);
  EXPECT_EQ(total(recorder), 0);
}

TEST(Recorder, AForkedChildDoesNotRecord) {
  recorder().on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::noise));
  const pid_t child = ::fork();
  if (child == 0) {
    recorder().on_alloc(0x2000, 50, kGpu, 0, tag_of(Category::noise));
    ::_exit(live(recorder(), Category::noise) == 100 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  recorder().on_free(0x1000, Phase::idle);
}

TEST(Recorder, AFreeIsOfTheThreadThatFrees) {
  const std::string path = (testing::scratch() / "threads.bin").string();
  Recorder recorder;
  recorder.start_events(std::make_unique<EventFile>(path, 100, EventFile::Calls{}));
  recorder.on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::noise));
  std::thread other([&] {
    ::pthread_setname_np(::pthread_self(), "frees");
    recorder.on_free(0x1000, Phase::idle);
  });
  other.join();
  recorder.stop_events().reset();

  const auto threads = names().list(Names::Kind::thread);
  const std::vector<Event> events = events_in(path);
  ASSERT_EQ(events.size(), 2U);
  EXPECT_NE(threads.at(events[0].thread), "frees");
  EXPECT_EQ(threads.at(events[1].thread), "frees");
}

// A thread's first call makes its tags, which takes a name; a fork takes the locks too.
TEST(Recorder, ForksAndNewThreadsDoNotWaitForEachOther) {
  recorder().on_alloc(0x1000, 100, kGpu, 0, tag_of(Category::noise));
  const auto forks_beside = [](auto call) {
    ::alarm(300);  // ends a process that waits for ever; a busy machine takes a minute
    ::signal(SIGCHLD, SIG_IGN);
    std::atomic<bool> done{false};
    std::thread others([&] {
      while (!done) std::thread(call).join();
    });
    for (int i = 0; i < 200; ++i) {
      if (::fork() == 0) ::_exit(0);
    }
    done = true;
    others.join();
    ::_exit(0);
  };
  const auto retag = [] {
    static std::uint8_t category = id(Category::noise);
    category = category == id(Category::noise) ? id(Category::gradients) : id(Category::noise);
    recorder().retag(0x1000, category, kKeep16);
  };
  const auto snapshot = [] { recorder().snapshot("look"); };
  EXPECT_EXIT(forks_beside(retag), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(forks_beside(snapshot), ::testing::ExitedWithCode(0), "");
  recorder().on_free(0x1000, Phase::idle);
}

// Hands out and takes back addresses as a caching allocator does: the one freed last goes first.
class ReusingAllocator {
 public:
  std::uint64_t take() {
    const std::lock_guard guard(mutex_);
    if (free_.empty()) return 512 * ++fresh_;
    const std::uint64_t address = free_.back();
    free_.pop_back();
    return address;
  }
  void give(std::uint64_t address) {
    const std::lock_guard guard(mutex_);
    free_.push_back(address);
  }

 private:
  std::mutex mutex_;
  std::vector<std::uint64_t> free_;
  std::uint64_t fresh_ = 0;
};

// Threads that allocate, free, retag, capture and look at once, over an event file; the sums hold
// at every look, and the file tells the same story: its events are in the order of their times.
TEST(Recorder, StaysConsistentUnderThreadsThatReuseAddresses) {
  const std::string path = (testing::scratch() / "reuse.bin").string();
  Recorder recorder;
  recorder.start_events(std::make_unique<EventFile>(path, 1'000'000, EventFile::Calls{}));
  ReusingAllocator allocator;
  std::atomic<bool> stop{false};
  std::atomic<std::int64_t> left{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<std::uint64_t, std::int64_t>> mine;
    for (int i = 0; i < 5000; ++i) {
      if (mine.size() < 20 || random() % 2 == 0) {
        const std::uint64_t address = allocator.take();
        const std::int64_t size = 1 + static_cast<std::int64_t>(random() % 5000);
        const auto category = static_cast<Category>(random() % kBuiltinCategories);
        recorder.on_alloc(address, static_cast<std::uint64_t>(size), kGpu, 0, tag_of(category));
        mine.emplace_back(address, size);
      } else {
        std::swap(mine[random() % mine.size()], mine.back());
        recorder.on_free(mine.back().first, Phase::backward);
        allocator.give(mine.back().first);
        mine.pop_back();
      }
      if (mine.empty()) continue;
      const std::uint64_t address = mine[random() % mine.size()].first;
      if (i % 3 == 0) recorder.retag(address, id(Category::noise), kKeep16);
      if (i % 7 == 0) recorder.release(recorder.capture(address));
      if (i % 100 == 0) recorder.end_step(true);
    }
    for (const auto& [address, size] : mine) left += size;
  };
  std::thread looking([&] {
    while (!stop) {
      for (const auto& state : recorder.snapshot("look").devices) {
        std::int64_t sum = 0;
        for (const std::int64_t bytes : state.categories) {
          EXPECT_GE(bytes, 0);
          sum += bytes;
        }
        EXPECT_EQ(sum, state.requested);
      }
      recorder.live_blocks();
      recorder.events_status();
    }
  });
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  stop = true;
  looking.join();
  EXPECT_EQ(total(recorder), left);
  recorder.stop_events().reset();

  std::unordered_map<std::uint64_t, std::uint64_t> alive;
  std::uint64_t last_time = 0;
  for (const Event& event : events_in(path)) {
    EXPECT_GT(event.time, last_time);
    last_time = event.time;
    const auto kind = static_cast<EventKind>(event.kind);
    if (kind == EventKind::alloc) {
      EXPECT_TRUE(alive.emplace(event.address, event.size).second);
    } else if (kind == EventKind::free) {
      EXPECT_EQ(alive.erase(event.address), 1U);
    }
  }
  std::int64_t sum = 0;
  for (const auto& [address, size] : alive) sum += static_cast<std::int64_t>(size);
  EXPECT_EQ(sum, left);
}

}  // namespace
}  // namespace opacus_memprof
