// SPDX-License-Identifier: Apache-2.0
// An allocator instead of torch's caching one, which counts for itself what it has handed out.
// Addresses stand for no memory, and the one that was given back last is handed out next.
//
// Like torch's, it takes a block back through its own deleter, knows blocks of pools whose state
// can be set back, and ignores a recorded stream where the deleter is not its own.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace opacus_memprof::testing {

namespace cca = c10::cuda::CUDACachingAllocator;

// cudaMemGetInfo() returns an error (fake_cuda.cpp).
extern bool memory_info_fails;

class FakeUpstream final : public cca::CUDAAllocator {
 public:
  static constexpr std::size_t kTooMuch = std::size_t{1} << 40U;  // from here on memory runs out
  static constexpr std::size_t kBroken = kTooMuch + 1;            // meets another error

  struct Block {
    std::size_t bytes = 0;
    bool reported = false;  // asked for while `is_reporting()`
    c10::CaptureId_t pool = 0;
    std::set<cudaStream_t> streams;
  };

  // `pause` is called where another thread may come between; never under the lock.
  FakeUpstream(std::function<void()> pause, std::function<bool()> is_reporting)
      : pause_(std::move(pause)), is_reporting_(std::move(is_reporting)) {
    instance_ = this;
  }

  // --- what a test asks ---
  [[nodiscard]] std::map<std::uint64_t, Block> live() {
    const std::lock_guard guard(mutex_);
    return live_;
  }
  // Blocks that a call is handing out or taking back.
  [[nodiscard]] std::set<std::uint64_t> in_passing() {
    const std::lock_guard guard(mutex_);
    std::set<std::uint64_t> all;
    for (const auto& [thread, mine] : passing_) all.insert(mine.begin(), mine.end());
    return all;
  }
  // The calling thread is inside no call.
  void leave() {
    const std::lock_guard guard(mutex_);
    passing_.erase(std::this_thread::get_id());
  }
  // Calls to free what was not handed out, or not any more.
  [[nodiscard]] int wrong_frees() {
    const std::lock_guard guard(mutex_);
    return wrong_frees_;
  }

  // --- reported by the allocator under test ---
  c10::DataPtr allocate(std::size_t bytes) override {
    void* pointer = hand_out(bytes);
    return {pointer, pointer, &give_back, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DataPtr allocateWithAddress(std::size_t bytes, void* /*address*/)
#ifdef OPACUS_MEMPROF_HAS_allocateWithAddress
      override
#endif
  {
    return allocate(bytes);
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void* raw_alloc(std::size_t bytes) override { return hand_out(bytes); }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t /*stream*/) override {
    return hand_out(bytes);
  }
  void raw_delete(void* pointer) override { give_back(pointer); }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    if (data.get_deleter() != &give_back) return;
    const std::lock_guard guard(mutex_);
    live_.at(reinterpret_cast<std::uint64_t>(data.get())).streams.insert(stream.stream());
  }
  cca::SnapshotInfo snapshot(c10::MempoolId_t /*pool*/, bool /*include_traces*/) override;
  // The calling thread allocates in this pool, whose addresses are handed out once.
  void beginAllocateToPool(c10::DeviceIndex /*device*/, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> /*filter*/) override {
    pool_ = pool.first;
  }
  void endAllocateToPool(c10::DeviceIndex /*device*/, c10::MempoolId_t /*pool*/) override {
    pool_ = 0;
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                          c10::MempoolId_t pool) override;
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                              std::shared_ptr<cca::AllocatorState> state) override;

  // --- of no importance here ---
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*count*/) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    return {};
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {}
  void init(int /*device_count*/) override {}
  double getMemoryFraction(c10::DeviceIndex /*device*/) override { return 1.0; }
  void setMemoryFraction(double /*fraction*/, c10::DeviceIndex /*device*/) override {}
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override {
    return {};
  }
  void enable(bool /*value*/) override {}
  [[nodiscard]] bool isEnabled() const override { return true; }
  void cacheInfo(c10::DeviceIndex /*device*/, std::size_t* largest) override { *largest = 0; }
  void* getBaseAllocation(void* pointer, std::size_t* /*size*/) override { return pointer; }
  void releasePool(c10::DeviceIndex /*device*/, c10::MempoolId_t /*pool*/) override {}
  cca::ShareableHandle shareIpcHandle(void* /*pointer*/) override { return {}; }
  std::shared_ptr<void> getIpcDevPtr(std::string /*handle*/) override { return nullptr; }
  bool isHistoryEnabled() override { return false; }
  void recordHistory(bool /*enabled*/, cca::CreateContextFn /*context*/, std::size_t /*entries*/,
                     cca::RecordContext /*when*/, bool /*clear*/,
                     const std::vector<std::string>& /*skip_actions*/) override {}
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver /*observer*/) override {}
#ifdef OPACUS_MEMPROF_HAS_attachOomRejectionObserver
  void attachOomRejectionObserver(cca::OomRejectionObserver /*observer*/) override {}
#endif
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker /*tracker*/) override {}
  void enablePeerAccess(c10::DeviceIndex /*device*/, c10::DeviceIndex /*peer*/) override {}
  cudaError_t memcpyAsync(void*, int, const void*, int, std::size_t, cudaStream_t, bool) override {
    return cudaSuccess;
  }
  std::string name() override { return "fake"; }

 private:
  static void give_back(void* pointer);
  void* hand_out(std::size_t bytes);
  std::set<std::uint64_t>& passing() { return passing_[std::this_thread::get_id()]; }

  static inline FakeUpstream* instance_ = nullptr;
  static inline thread_local c10::CaptureId_t pool_ = 0;

  std::function<void()> pause_;
  std::function<bool()> is_reporting_;
  std::mutex mutex_;  // guards what follows
  std::map<std::uint64_t, Block> live_;
  std::vector<std::uint64_t> free_addresses_;
  std::uint64_t next_address_ = 0x7000'0000'0000;
  std::map<std::thread::id, std::set<std::uint64_t>> passing_;
  int wrong_frees_ = 0;
};

}  // namespace opacus_memprof::testing
