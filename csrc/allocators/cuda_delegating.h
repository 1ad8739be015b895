// SPDX-License-Identifier: Apache-2.0
// A CUDAAllocator that forwards every virtual method to the wrapped one and reports allocations and
// frees.
//
// torch's base class has defaults for several methods that throw or do nothing, so a missing method
// would be lost silently. tests/unit/test_forwarding.py reads the installed header and fails if one
// is missing. The OPACUS_MEMPROF_HAS_* macros come from setup.py, which looks each method up in
// that header.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "allocators/cuda_reserved.h"

namespace opacus_memprof {

namespace cca = c10::cuda::CUDACachingAllocator;

class DelegatingCudaAllocator final : public cca::CUDAAllocator {
 public:
  explicit DelegatingCudaAllocator(cca::CUDAAllocator* upstream);

  [[nodiscard]] cca::CUDAAllocator* upstream() const noexcept { return upstream_; }
  // Whether blocks are reported: until uninstall(), and again from the next install() on. In
  // between it stays installed and forwards calls while reported blocks are live, because torch
  // finds these only through it when a stream is recorded for them or a pool is restored.
  [[nodiscard]] bool is_reporting() const noexcept;
  void set_reporting(bool on) noexcept;
  void forget_pools() noexcept { open_pools_ = 0; }
  [[nodiscard]] ReservedMemory& reserved() noexcept { return reserved_; }

  // Whether torch records a history for the program. Asked of upstream at install, and tracked here
  // from then on.
  [[nodiscard]] bool records_history() const noexcept {
    return records_history_.load(std::memory_order_relaxed);
  }
  void look_for_history() {
    try {
      // torch's own allocator asks its first device, which exists only after initialization.
      records_history_ = upstream_->initialized() && upstream_->isHistoryEnabled();
    } catch (const c10::Error&) {
      records_history_ = false;  // an upstream without one
    }
  }

  // --- reported (cuda_allocator.cpp) ---
  [[gnu::hot, gnu::flatten]] c10::DataPtr allocate(size_t size) override;
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override;
  void* raw_alloc(size_t size) override;
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                              std::shared_ptr<cca::AllocatorState> state) override;
#ifdef OPACUS_MEMPROF_HAS_allocateWithAddress
  c10::DataPtr allocateWithAddress(size_t size, void* address) override;
#endif

  void resetPeakStats(c10::DeviceIndex device) override {
    reserved_.reset_upstream(*upstream_, device);
  }

  // --- forwarded as they are ---
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    upstream_->copy_data(destination, source, count);
  }
  [[nodiscard]] bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return upstream_->is_simple_data_ptr(data);
  }
  bool initialized() override { return upstream_->initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { upstream_->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return upstream_->getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    upstream_->resetAccumulatedStats(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return upstream_->getMemoryInfo(device);
  }
  void init(int device_count) override { upstream_->init(device_count); }
  double getMemoryFraction(c10::DeviceIndex device) override {
    return upstream_->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    upstream_->setMemoryFraction(fraction, device);
  }
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
    return upstream_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { upstream_->enable(value); }
  [[nodiscard]] bool isEnabled() const override { return upstream_->isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override {
    upstream_->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* pointer, size_t* size) override {
    return upstream_->getBaseAllocation(pointer, size);
  }
  cca::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override {
    return upstream_->snapshot(pool, include_traces);
  }
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    upstream_->beginAllocateToPool(device, pool, std::move(filter));
    ++open_pools_;
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    upstream_->endAllocateToPool(device, pool);
    if (open_pools_ > 0) --open_pools_;  // it may have been opened before install()
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    upstream_->releasePool(device, pool);
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return upstream_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<cca::CUDAAllocator> allocator) override {
    upstream_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override {
    upstream_->setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    upstream_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return upstream_->checkPoolLiveAllocations(device, pool, expected);
  }
  cca::ShareableHandle shareIpcHandle(void* pointer) override {
    return upstream_->shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return upstream_->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return upstream_->isHistoryEnabled(); }
  void recordHistory(bool enabled, cca::CreateContextFn context, size_t max_entries,
                     cca::RecordContext when, bool clear,
                     const std::vector<std::string>& skip_actions) override {
    upstream_->recordHistory(enabled, context, max_entries, when, clear, skip_actions);
    records_history_ = enabled;
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    upstream_->recordAnnotation(metadata);
  }
  void pushCompileContext(std::string& metadata) override {
    upstream_->pushCompileContext(metadata);
  }
  void popCompileContext() override { upstream_->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override {
    upstream_->setUserMetadata(metadata);
  }
  std::string getUserMetadata() override { return upstream_->getUserMetadata(); }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
    upstream_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
    upstream_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override {
    upstream_->enablePeerAccess(device, peer);
  }
  cudaError_t memcpyAsync(void* destination, int destination_device, const void* source,
                          int source_device, size_t count, cudaStream_t stream,
                          bool p2p_enabled) override {
    return upstream_->memcpyAsync(destination, destination_device, source, source_device, count,
                                  stream, p2p_enabled);
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                          c10::MempoolId_t pool) override {
    return upstream_->getCheckpointState(device, pool);
  }
  // The upstream's name, because programs and torch itself ask which backend runs.
  std::string name() override { return upstream_->name(); }
#ifdef OPACUS_MEMPROF_HAS_markCaptureBegin
  void markCaptureBegin(c10::DeviceIndex device) override { upstream_->markCaptureBegin(device); }
#endif
#ifdef OPACUS_MEMPROF_HAS_markCaptureEnd
  void markCaptureEnd(c10::DeviceIndex device) override { upstream_->markCaptureEnd(device); }
#endif
#ifdef OPACUS_MEMPROF_HAS_getContextForPointer
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return upstream_->getContextForPointer(pointer);
  }
#endif
#ifdef OPACUS_MEMPROF_HAS_supportsUserMetadata
  bool supportsUserMetadata() override { return upstream_->supportsUserMetadata(); }
#endif
#ifdef OPACUS_MEMPROF_HAS_annotateMemory
  void annotateMemory(const void* pointer, const std::string& metadata) override {
    upstream_->annotateMemory(pointer, metadata);
  }
#endif
#ifdef OPACUS_MEMPROF_HAS_attachOomRejectionObserver
  void attachOomRejectionObserver(cca::OomRejectionObserver observer) override {
    upstream_->attachOomRejectionObserver(std::move(observer));
  }
#endif

 private:
  // Whether new blocks belong to torch alone: between uninstall() and install(), except those of a
  // pool. torch restores a pool's state only if all its blocks have the deleter of the installed
  // allocator. (A storage keeps the allocator that made it, perhaps this one after it was removed,
  // and calls it when it is resized.)
  [[nodiscard]] bool passes_on() const noexcept;
  // Returns the result of `allocate`, a call of upstream.
  template <typename Allocate>
  auto watch(size_t size, Allocate allocate) -> decltype(allocate());
  c10::DataPtr allocate_and_report(size_t size, const void* return_address);
  // Used while torch records a history, or after uninstall().
  [[gnu::cold, gnu::noinline]] c10::DataPtr allocate_rarely(size_t size,
                                                            const void* return_address);

  cca::CUDAAllocator* upstream_;
  std::atomic<bool> records_history_{false};
  std::atomic<int> open_pools_{0};  // that threads allocate in
  ReservedMemory reserved_;
};

// Calls function(address, block, device) for every block of the allocator, including free ones.
template <typename Function>
void for_each_block(cca::CUDAAllocator& allocator, Function function) {
  for (const auto& segment : allocator.snapshot({0, 0}, false).segments) {
    std::uint64_t address = segment.address;
    for (const auto& block : segment.blocks) {
      function(address, block, segment.device);
      address += block.size;
    }
  }
}

}  // namespace opacus_memprof
