// SPDX-License-Identifier: Apache-2.0
#include "core/follower.h"

namespace opacus_memprof {

Follower::Follower(const std::string& path) : reader_(path), walk_(*this) {}

std::uint64_t Follower::advance() {
  const std::uint64_t before = walk_.events();
  reader_.refresh();
  walk_.read_on(reader_);
  add_up();
  return walk_.events() - before;
}

void Follower::add_up() {
  for (auto& [id, device] : devices_) {
    device.categories = {};
    device.modules.clear();
  }
  walk_.table().for_each([this](const ReplayBlock& block) {
    Device& device = device_of(block);
    device.categories[block.category] += static_cast<std::int64_t>(block.size);
    device.modules[block.module][block.category] += static_cast<std::int64_t>(block.size);
  });
}

Follower::Device& Follower::device_of(const ReplayBlock& block) {
  Device& device = devices_[block.device()];
  device.id = block.device();
  return device;
}

void Follower::born(const ReplayBlock& block) {
  Device& device = device_of(block);
  device.bytes += static_cast<std::int64_t>(block.size);
  if (device.bytes > device.peak_bytes) {
    device.peak_bytes = device.bytes;
    device.peak_step = step_;
  }
}

void Follower::died(const ReplayBlock& block, const Event& /*event*/) {
  device_of(block).bytes -= static_cast<std::int64_t>(block.size);
}

void Follower::after(const Event& event, std::uint64_t /*index*/) {
  const auto kind = static_cast<EventKind>(event.kind);
  if (kind == EventKind::seed) return;  // describes its birth, long ago
  phase_ = static_cast<std::uint8_t>(event.phase);
  step_ = static_cast<std::uint32_t>(event.step);
  if (kind == EventKind::oom) ++out_of_memory_;
  if (kind != EventKind::step) return;
  logical_step_ = event.size;
  for (auto& [id, device] : devices_) {
    device.step_ends.push_back(device.bytes);
    if (device.step_ends.size() > kRecentSteps) device.step_ends.pop_front();
  }
}

}  // namespace opacus_memprof
