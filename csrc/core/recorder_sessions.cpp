// SPDX-License-Identifier: Apache-2.0
// The recorder's functions for sessions: counters, peaks, live blocks, failures, the event file.
#include <list>
#include <mutex>
#include <utility>

#include "core/clock.h"
#include "core/names.h"
#include "core/recorder.h"

namespace opacus_memprof {

namespace {

constexpr std::size_t kMostNamesWithSnapshots = 0x8000;

}  // namespace

// Memory for the devices is reserved: nothing is allocated under the lock.
void Recorder::read_counters(State& state) noexcept {
  state.unix_ns = unix_ns();
  state.step = physical_.load();
  state.logical_step = logical_.load();
  live_.for_each_device([&](Device device, const DeviceCounters& counters) {
    state.devices.push_back({{device, counters.total(), counters.categories()},
                             counters.highest(),
                             counters.newest_phase(),
                             counters.reserved()});
  });
}

Recorder::State Recorder::state() {
  State result;
  result.devices.reserve(kMaxDevices);
  const std::lock_guard guard(lock_);
  read_counters(result);
  return result;
}

Recorder::Snapshot Recorder::snapshot(const std::string& name) {
  // The number of snapshot names is unlimited. Half of the names is reserved for operations; beyond
  // that, only snapshots.jsonl has a snapshot's name.
  const bool has_room = names().size(Names::Kind::op) < kMostNamesWithSnapshots;
  const std::uint16_t op = has_room ? names().intern(Names::Kind::op, name) : std::uint16_t{0};
  const ThreadTags& thread = this_thread();
  Snapshot result;
  result.name = name;
  result.devices.reserve(kMaxDevices);
  const std::lock_guard guard(lock_);
  result.index = snapshots_++;
  read_counters(result);
  write_mark(EventKind::snapshot, thread, static_cast<std::uint8_t>(thread.phase()), op,
             result.index);
  return result;
}

std::vector<Recorder::DevicePeak> Recorder::peaks() {
  std::vector<DevicePeak> result;
  result.reserve(kMaxDevices);
  const std::lock_guard guard(lock_);
  live_.for_each_device([&](Device device, DeviceCounters& counters) {
    result.push_back({counters.peak(), device, counters.reserved()});
  });
  return result;
}

void Recorder::reset_peaks() noexcept {
  const auto phase = static_cast<std::uint8_t>(this_thread().phase());
  const std::lock_guard guard(lock_);
  live_.reset_peaks(phase, step());
}

std::vector<Block> Recorder::live_blocks() {
  return copy_blocks([] {});
}

std::vector<Block> Recorder::resume_after_loss(EventFile& file) {
  return copy_blocks([&] { file.resume(); });
}

template <typename Then>
std::vector<Block> Recorder::copy_blocks(Then then) {
  std::vector<Block> blocks;
  for (;;) {  // memory is allocated outside the lock
    std::size_t expected = 0;
    {
      const std::lock_guard guard(lock_);
      expected = live_.size();
    }
    blocks.reserve(expected + expected / 8 + 64);
    const std::lock_guard guard(lock_);
    if (live_.size() > blocks.capacity()) continue;
    live_.for_each_block([&](const Block& block) { blocks.push_back(block); });
    then();
    return blocks;
  }
}

std::vector<Failure> Recorder::failures() {
  const std::lock_guard guard(lock_);
  return {failures_.newest().begin(), failures_.newest().end()};
}

void Recorder::start_events(std::unique_ptr<EventFile> file) {
  std::list<Failure> forgotten;
  const std::lock_guard guard(lock_);
  log_.start(std::move(file));
  physical_ = logical_ = 0;  // a profile counts its own steps
  forgotten = failures_.clear();
  live_.for_each_block([&](Block& block) {
    block.step = 0;
    log_.write(EventKind::seed, block, block.phase, block.op, block.step);
  });
}

std::unique_ptr<EventFile> Recorder::stop_events() noexcept {
  const std::lock_guard guard(lock_);
  return log_.stop();
}

void Recorder::flush_events() {
  if (EventFile* file = log_.file(); file != nullptr) file->flush();
}

EventLog::Status Recorder::events_status() {
  const std::lock_guard guard(lock_);
  return log_.status();
}

}  // namespace opacus_memprof
