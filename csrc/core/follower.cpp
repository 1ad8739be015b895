// SPDX-License-Identifier: Apache-2.0
#include "core/follower.h"

#include "core/event_reader.h"

namespace opacus_memprof {
namespace {

constexpr std::size_t kChunkRecords = 16384;

}  // namespace

Follower::Follower(const std::string& path)
    : file_(path, std::ios::binary),
      header_(EventReader(path).header()),
      buffer_(kChunkRecords),
      walk_(*this) {}

std::uint64_t Follower::advance() {
  const std::uint64_t before = walk_.events();
  // The header first: what it counts must be among the records that are then read.
  read_header();
  bool more = true;
  while (more) {
    file_.clear();  // the last look ended at the end of the file
    file_.seekg(static_cast<std::streamoff>(kHeaderBytes + walk_.events() * sizeof(Event)));
    file_.read(reinterpret_cast<char*>(buffer_.data()),
               static_cast<std::streamsize>(buffer_.size() * sizeof(Event)));
    const auto read = static_cast<std::size_t>(file_.gcount()) / sizeof(Event);
    more = read == buffer_.size();
    for (std::size_t i = 0; i < read; ++i) {
      if (!walk_.visit(buffer_[i])) {
        more = false;
        break;
      }
    }
  }
  add_up();
  return walk_.events() - before;
}

void Follower::read_header() {
  file_.clear();
  file_.seekg(0);
  FileHeader now{};
  if (file_.read(reinterpret_cast<char*>(&now), sizeof(now))) header_ = now;
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
  if (kind == EventKind::seed) return;  // tells of its birth, long ago
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
