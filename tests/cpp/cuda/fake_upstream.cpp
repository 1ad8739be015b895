// SPDX-License-Identifier: Apache-2.0
#include "fake_upstream.h"

namespace opacus_memprof::testing {

namespace {

constexpr std::uint64_t kSpacing = 1 << 20U;

struct Checkpoint final : cca::AllocatorState {
  c10::CaptureId_t pool = 0;
  std::map<std::uint64_t, FakeUpstream::Block> live;
};

void* pointer_to(std::uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

void* FakeUpstream::hand_out(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const bool reported = is_reporting_();
  leave();
  pause_();
  TORCH_CHECK(bytes != kBroken, "an illegal memory access was encountered");
  TORCH_CHECK_WITH(OutOfMemoryError, bytes < kTooMuch, "CUDA out of memory.");
  std::uint64_t address = 0;
  {
    const std::lock_guard guard(mutex_);
    if (pool_ != 0 || free_addresses_.empty()) {
      address = next_address_ += kSpacing;
    } else {
      address = free_addresses_.back();
      free_addresses_.pop_back();
    }
    live_[address] = {.bytes = bytes, .reported = reported, .pool = pool_, .streams = {}};
    passing() = {address};
  }
  pause_();
  return pointer_to(address);
}

void FakeUpstream::give_back(void* pointer) {
  if (pointer == nullptr) return;
  FakeUpstream& self = *instance_;
  const auto address = reinterpret_cast<std::uint64_t>(pointer);
  {
    const std::lock_guard guard(self.mutex_);
    self.passing() = {address};
  }
  self.pause_();
  {
    const std::lock_guard guard(self.mutex_);
    self.passing().clear();
    const auto found = self.live_.find(address);
    if (found == self.live_.end()) {
      ++self.wrong_frees_;
      return;
    }
    if (found->second.pool == 0) self.free_addresses_.push_back(address);
    self.live_.erase(found);
  }
  self.pause_();
}

cca::SnapshotInfo FakeUpstream::snapshot(c10::MempoolId_t /*pool*/, bool /*include_traces*/) {
  pause_();
  cca::SnapshotInfo info;
  {
    const std::lock_guard guard(mutex_);
    for (const auto& [address, block] : live_) {
      c10::CachingDeviceAllocator::SegmentInfo segment;
      segment.address = address;
      segment.total_size = kSpacing;
      c10::CachingDeviceAllocator::BlockInfo used;
      used.size = kSpacing;
      used.requested_size = block.bytes;
      used.allocated = used.active = true;
      segment.blocks.push_back(used);
      info.segments.push_back(segment);
    }
  }
  pause_();
  return info;
}

std::shared_ptr<cca::AllocatorState> FakeUpstream::getCheckpointState(c10::DeviceIndex /*device*/,
                                                                      c10::MempoolId_t pool) {
  auto state = std::make_shared<Checkpoint>();
  state->pool = pool.first;
  const std::lock_guard guard(mutex_);
  for (const auto& [address, block] : live_) {
    if (block.pool == pool.first) state->live[address] = block;
  }
  return state;
}

// As torch does: what is live in the pool goes, and what was live comes.
cca::CheckpointDelta FakeUpstream::setCheckpointPoolState(
    c10::DeviceIndex /*device*/, std::shared_ptr<cca::AllocatorState> state) {
  pause_();
  const bool reported = is_reporting_();
  const auto& wanted = dynamic_cast<Checkpoint&>(*state);
  cca::CheckpointDelta delta;
  const std::lock_guard guard(mutex_);
  passing().clear();
  std::erase_if(live_, [&](const auto& entry) {
    if (entry.second.pool != wanted.pool) return false;
    delta.ptrs_freed.push_back(pointer_to(entry.first));
    return true;
  });
  for (const auto& [address, block] : wanted.live) {
    live_[address] = block;
    live_[address].reported = reported;
    passing().insert(address);
    delta.dataptrs_allocd.emplace_back(pointer_to(address), pointer_to(address), &give_back,
                                       c10::Device(c10::DeviceType::CUDA, 0));
  }
  return delta;
}

}  // namespace opacus_memprof::testing
