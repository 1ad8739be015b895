// SPDX-License-Identifier: Apache-2.0
// The CUDA allocator over one that counts for itself: what that has handed out and what the ledger
// says agree to the byte, and each block goes back once.
#include "allocators/cuda_allocator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <random>
#include <thread>

#include "../linalg/linalg.h"
#include "fake_upstream.h"
#include "interleaving.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace opacus_memprof {
namespace {

namespace cca = c10::cuda::CUDACachingAllocator;
using testing::FakeUpstream;
using testing::Interleaving;

constexpr Device kGpu = 1;

void pause_or_yield() {
  thread_local std::minstd_rand random(
      static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id())));
  if (!Interleaving::pause() && random() % 8 == 0) std::this_thread::yield();
}

FakeUpstream& fake() {
  static auto* const upstream = [] {
    auto* made = new FakeUpstream(pause_or_yield, [] { return cuda_allocator().installed(); });
#if defined(__SANITIZE_ADDRESS__)
    // The recorder lies in memory that the search for leaks does not know.
    __lsan_register_root_region(&recorder(), sizeof(Recorder));
#endif
    cca::allocator.store(made);
    c10::SetAllocator(c10::DeviceType::CUDA, made);
    return made;
  }();
  return *upstream;
}

std::uint64_t address_in(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

std::int64_t bytes_in_counters() {
  for (const auto& device : recorder().state().devices) {
    if (device.device == kGpu) return device.requested;
  }
  return 0;
}

std::map<std::uint64_t, std::size_t> ledger() {
  std::map<std::uint64_t, std::size_t> found;
  for (const Block& block : recorder().live_blocks()) found[block.address] = block.size();
  return found;
}

std::map<std::uint64_t, std::size_t> handed_out() {
  std::map<std::uint64_t, std::size_t> found;
  for (const auto& [address, block] : fake().live()) found[address] = block.bytes;
  return found;
}

std::int64_t sum(const std::map<std::uint64_t, std::size_t>& blocks) {
  std::int64_t bytes = 0;
  for (const auto& [address, size] : blocks) bytes += static_cast<std::int64_t>(size);
  return bytes;
}

void expect_agreement() {
  EXPECT_EQ(ledger(), handed_out());
  EXPECT_EQ(bytes_in_counters(), sum(handed_out()));
  EXPECT_EQ(fake().wrong_frees(), 0);
}

// What a thread of a training program may do with the current allocator, drawn.
class Program {
 public:
  // Without a pool (0) it has none whose state is set back.
  Program(unsigned seed, c10::CaptureId_t pool) : random_(seed), pool_{pool, 0} {}

  void act() {
    switch (random_() % 16) {
      case 0:
        return run_out();
      case 1:
        raw_.push_back(cca::get()->raw_alloc(size()));
        break;
      case 2:
        raw_.push_back(cca::get()->raw_alloc_with_stream(size(), nullptr));
        break;
      case 3:
      case 4:
        delete_raw();
        break;
      case 5:
        record_stream();
        break;
      case 6:
        if (pool_.first != 0) in_pool();
        break;
      case 7:
        if (pool_.first != 0) set_pool_back();
        break;
      case 8:
      case 9:
      case 10:
      case 11:
        if (!data_.empty()) {
          std::swap(data_[random_() % data_.size()], data_.back());
          data_.pop_back();
        }
        break;
      default:
        data_.push_back(cca::get()->allocate(size()));
    }
    fake().leave();
  }

  void end() {
    while (!raw_.empty()) delete_raw();
    data_.clear();
    in_pool_.clear();
    fake().leave();
  }

 private:
  std::size_t size() { return random_() % 20 == 0 ? 0 : 1 + random_() % 100'000; }

  void run_out() {
    EXPECT_THROW(cca::get()->allocate(FakeUpstream::kTooMuch), c10::OutOfMemoryError);
    EXPECT_THROW(cca::get()->raw_alloc(FakeUpstream::kTooMuch), c10::OutOfMemoryError);
    EXPECT_THROW(cca::get()->allocate(FakeUpstream::kBroken), c10::Error);
    fake().leave();
  }

  void delete_raw() {
    if (raw_.empty()) return;
    void* const pointer = raw_.back();
    raw_.pop_back();
    if (random_() % 2 == 0) {
      cca::get()->raw_delete(pointer);
    } else {
      cca::get()->raw_deleter()(pointer);
    }
  }

  void record_stream() {
    if (data_.empty() || !data_.back()) return;
    const auto stream = reinterpret_cast<cudaStream_t>(0x1000 * (1 + random_() % 4));
    const c10::Stream wanted = c10::cuda::getStreamFromExternal(stream, 0);
    cca::get()->recordStream(data_.back(), wanted);
    EXPECT_TRUE(fake().live().at(address_in(data_.back().get())).streams.contains(stream));
  }

  void in_pool() {
    cca::get()->beginAllocateToPool(0, pool_, [](cudaStream_t) { return true; });
    in_pool_.push_back(cca::get()->allocate(1 + random_() % 100'000));
    cca::get()->endAllocateToPool(0, pool_);
    if (random_() % 2 == 0) checkpoint_ = cca::get()->getCheckpointState(0, pool_);
  }

  // As torch's graph trees do it: what the pool has let go loses its deleter.
  void set_pool_back() {
    if (checkpoint_ == nullptr) return;
    cca::CheckpointDelta delta = cca::get()->setCheckpointPoolState(0, checkpoint_);
    EXPECT_EQ(delta.ptrs_freed.size(), in_pool_.size());
    for (c10::DataPtr& data : in_pool_) {
      EXPECT_TRUE(
          data.compare_exchange_deleter(cca::get()->raw_deleter(), &c10::detail::deleteNothing));
    }
    in_pool_ = std::move(delta.dataptrs_allocd);
  }

  std::mt19937 random_;
  c10::MempoolId_t pool_;
  std::vector<c10::DataPtr> data_;
  std::vector<void*> raw_;
  std::vector<c10::DataPtr> in_pool_;
  std::shared_ptr<cca::AllocatorState> checkpoint_;
};

class CudaAllocator : public ::testing::Test {
 protected:
  void SetUp() override { fake(); }
  void TearDown() override {
    cuda_allocator().uninstall();
    EXPECT_TRUE(fake().live().empty());
    EXPECT_EQ(fake().wrong_frees(), 0);
    EXPECT_EQ(cca::get(), &fake());
  }
};

TEST_F(CudaAllocator, AgreesAtEachSwitchOfDrawnInterleavings) {
  constexpr unsigned kSeeds = 100;
  constexpr unsigned kPrograms = 3;
  cuda_allocator().install();
  for (unsigned seed = 0; seed < kSeeds && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    // All that no call is handing out or taking back.
    Interleaving interleaving(seed, [] {
      std::int64_t known = 0;
      const auto passing = fake().in_passing();
      for (const auto& [address, block] : fake().live()) {
        const std::uint64_t bytes = recorder().size_of(address);
        if (!passing.contains(address)) {
          EXPECT_EQ(bytes, block.bytes);
        }
        known += static_cast<std::int64_t>(bytes);
      }
      EXPECT_EQ(bytes_in_counters(), known);
    });
    std::vector<std::function<void()>> bodies;
    for (unsigned i = 0; i < kPrograms; ++i) {
      bodies.emplace_back([=] {
        Program program(kPrograms * seed + i, 1 + i);
        for (int acts = 0; acts < 40; ++acts) program.act();
        program.end();
      });
    }
    interleaving.run(bodies);
    expect_agreement();
  }
}

// A call that has begun before install() and ends after it is not reported; all others are.
TEST_F(CudaAllocator, AgreesWhereInstallAndUninstallComeBetween) {
  constexpr unsigned kSeeds = 100;
  constexpr unsigned kPrograms = 3;
  for (unsigned seed = 0; seed < kSeeds && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    std::vector<Program> programs;
    std::vector<std::function<void()>> bodies;
    for (unsigned i = 0; i < kPrograms; ++i) programs.emplace_back(kPrograms * seed + i, 0);
    for (Program& program : programs) {
      bodies.emplace_back([&program] {
        for (int acts = 0; acts < 40; ++acts) program.act();
      });
    }
    bodies.emplace_back([] {
      for (int times = 0; times < 4; ++times) {
        cuda_allocator().install();
        for (int acts = 0; acts < 5; ++acts) Interleaving::pause();
        cuda_refresh(0);
        cuda_allocator().uninstall();
        for (int acts = 0; acts < 5; ++acts) Interleaving::pause();
      }
      cuda_allocator().install();
    });
    Interleaving(seed, [] {}).run(bodies);
    cuda_refresh(0);
    auto missing = fake().live();
    for (const auto& [address, bytes] : ledger()) {
      const auto found = missing.find(address);
      ASSERT_NE(found, missing.end());
      EXPECT_EQ(found->second.bytes, bytes);
      missing.erase(found);
    }
    for (const auto& [address, block] : missing) EXPECT_FALSE(block.reported);
    cuda_allocator().uninstall();
    cuda_allocator().install();
    expect_agreement();
    for (Program& program : programs) program.end();
    cuda_refresh(0);
    expect_agreement();
    cuda_allocator().uninstall();
    EXPECT_EQ(cca::get(), &fake());
  }
}

TEST_F(CudaAllocator, AgreesUnderThreadsThatRunFreely) {
  constexpr unsigned kPrograms = 4;
  constexpr int kRounds = 20;
  cuda_allocator().install();
  std::barrier round(kPrograms, []() noexcept { expect_agreement(); });
  std::atomic<unsigned> running{kPrograms};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kPrograms; ++i) {
    threads.emplace_back([&, i] {
      Program program(i, 1 + i);
      for (int rounds = 0; rounds < kRounds; ++rounds) {
        for (int acts = 0; acts < 100; ++acts) program.act();
        round.arrive_and_wait();
      }
      program.end();
      --running;
    });
  }
  while (running > 0) {  // what a session asks meanwhile
    cuda_refresh(0);
    recorder().snapshot("look");
  }
  for (std::thread& thread : threads) thread.join();
  expect_agreement();
}

TEST_F(CudaAllocator, InstallsAndUninstallsUnderThreadsThatRunFreely) {
  constexpr unsigned kPrograms = 4;
  std::atomic<unsigned> running{kPrograms};
  std::atomic<bool> has_ended{false};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kPrograms; ++i) {
    threads.emplace_back([&, i] {
      Program program(100 + i, 0);
      for (int acts = 0; acts < 3000; ++acts) program.act();
      --running;
      while (!has_ended) std::this_thread::yield();
      program.end();
    });
  }
  while (running > 0) {
    cuda_allocator().install();
    cuda_refresh(0);
    cuda_allocator().uninstall();
  }
  cuda_allocator().install();
  expect_agreement();
  cuda_allocator().uninstall();
  has_ended = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaAllocator, ABlockThatOutlivesUninstallKeepsItsStreams) {
  const auto stream = reinterpret_cast<cudaStream_t>(0x7000);
  const c10::Stream side = c10::cuda::getStreamFromExternal(stream, 0);
  cuda_allocator().install();
  c10::DataPtr block = cca::get()->allocate(100);
  c10::DataPtr other = cca::get()->allocate(200);
  cuda_allocator().uninstall();
  EXPECT_FALSE(cuda_allocator().installed());
  c10::DataPtr later = cca::get()->allocate(300);
  for (const c10::DataPtr* data : {&block, &other, &later}) {
    cca::get()->recordStream(*data, side);
    EXPECT_TRUE(fake().live().at(address_in(data->get())).streams.contains(stream));
  }
  EXPECT_EQ(recorder().size_of(address_in(later.get())), 0U);  // nobody's
  block.clear();
  EXPECT_NE(cca::get(), &fake());
  other.clear();
  EXPECT_EQ(cca::get(), &fake());  // with the last one, while what came later lives on
}

TEST_F(CudaAllocator, APoolThatOutlivesUninstallCanBeSetBack) {
  constexpr c10::MempoolId_t kPool{1, 0};
  const auto in_pool = [&](std::size_t bytes) {
    cca::get()->beginAllocateToPool(0, kPool, [](cudaStream_t) { return true; });
    c10::DataPtr data = cca::get()->allocate(bytes);
    cca::get()->endAllocateToPool(0, kPool);
    return data;
  };
  cuda_allocator().install();
  std::vector<c10::DataPtr> blocks;
  blocks.push_back(in_pool(100));
  const auto state = cca::get()->getCheckpointState(0, kPool);
  cuda_allocator().uninstall();
  blocks.push_back(in_pool(200));
  cca::CheckpointDelta delta = cca::get()->setCheckpointPoolState(0, state);
  for (c10::DataPtr& data : blocks) {
    EXPECT_TRUE(
        data.compare_exchange_deleter(cca::get()->raw_deleter(), &c10::detail::deleteNothing));
  }
  ASSERT_EQ(delta.dataptrs_allocd.size(), 1U);
  EXPECT_EQ(delta.dataptrs_allocd[0].get_deleter(), cca::get()->raw_deleter());
  expect_agreement();
  delta.dataptrs_allocd.clear();
  EXPECT_EQ(cca::get(), &fake());
}

TEST_F(CudaAllocator, AStorageThatIsResizedAfterUninstallIsItsOwnAgain) {
  cuda_allocator().install();
  c10::Allocator* const of_storage = cca::get();
  cuda_allocator().uninstall();
  const c10::DataPtr data = of_storage->allocate(100);
  EXPECT_EQ(data.get_deleter(), fake().raw_deleter());
}

TEST_F(CudaAllocator, WhatTorchsLibraryForLinearAlgebraAsksForIsAWorkspace) {
  cuda_allocator().install();
  const c10::DataPtr workspace = testing::workspace_of_linalg(1000);
  const c10::DataPtr other = cca::get()->allocate(2000);
  for (const Block& block : recorder().live_blocks()) {
    const bool is_workspace = block.address == address_in(workspace.get());
    EXPECT_EQ(block.category() == static_cast<std::uint8_t>(Category::library_workspace),
              is_workspace);
  }
  EXPECT_EQ(recorder().size_of(address_in(workspace.get())), 1000U);
}

TEST_F(CudaAllocator, AFailedRequestIsRecordedOnce) {
  cuda_allocator().install();
  const std::size_t before = recorder().failures().size();
  EXPECT_THROW(cca::get()->allocate(FakeUpstream::kBroken), c10::Error);
  EXPECT_EQ(recorder().failures().size(), before);
  EXPECT_THROW(cca::get()->allocate(FakeUpstream::kTooMuch), c10::OutOfMemoryError);
  EXPECT_EQ(recorder().failures().back().requested, FakeUpstream::kTooMuch);
  EXPECT_EQ(recorder().failures().back().upstream.device_total, std::int64_t{4} << 30);
}

TEST_F(CudaAllocator, AFailedRequestIsRecordedHoweverItIsMade) {
  cuda_allocator().install();
  const auto expect_recorded = [](std::size_t bytes, auto allocate) {
    EXPECT_THROW(allocate(bytes), c10::OutOfMemoryError);
    EXPECT_EQ(recorder().failures().back().requested, bytes);
  };
  expect_recorded(FakeUpstream::kTooMuch + 2, [](auto bytes) { cca::get()->raw_alloc(bytes); });
  expect_recorded(FakeUpstream::kTooMuch + 3,
                  [](auto bytes) { cca::get()->raw_alloc_with_stream(bytes, nullptr); });
#ifdef OPACUS_MEMPROF_HAS_allocateWithAddress
  expect_recorded(FakeUpstream::kTooMuch + 4,
                  [](auto bytes) { cca::get()->allocateWithAddress(bytes, nullptr); });
#endif
}

// Where CUDA does not say how large the device is, the allocator's limit on it is unknown.
TEST_F(CudaAllocator, WhatCudaDoesNotSayIsUnknown) {
  cuda_allocator().install();
  testing::memory_info_fails = true;
  EXPECT_THROW(cca::get()->allocate(FakeUpstream::kTooMuch), c10::OutOfMemoryError);
  testing::memory_info_fails = false;
  const UpstreamAtFailure found = recorder().failures().back().upstream;
  EXPECT_EQ(found.device_total, -1);
  EXPECT_EQ(found.device_free, -1);
  EXPECT_EQ(found.limit, -1);
}

}  // namespace
}  // namespace opacus_memprof
