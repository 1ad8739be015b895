// SPDX-License-Identifier: Apache-2.0
#include "core/recorder.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/clock.h"
#include "core/names.h"

namespace opacus_memprof {

namespace {

constexpr auto kUndecided = static_cast<std::uint8_t>(Category::forward_undecided);
constexpr auto kBackward = static_cast<std::uint8_t>(Category::backward_temporaries);
constexpr auto kShared = static_cast<std::uint8_t>(Category::activation_hooks_shared);
constexpr auto kOpacusOnly = static_cast<std::uint8_t>(Category::activation_hooks_opacus_only);

constexpr std::uint64_t kMask48 = (std::uint64_t{1} << 48U) - 1;

std::uint8_t phase_of_this_thread() noexcept {
  return static_cast<std::uint8_t>(this_thread().phase());
}

}  // namespace

// A forked child (a DataLoader worker) shares the parent's file and inherits its locks: nobody may
// be inside while the process forks, and the child stops recording.
struct ForkHandlers {
  static void prepare() {
    names().lock();
    recorder().lock_.lock();
  }
  static void parent() {
    recorder().lock_.unlock();
    names().unlock();
  }
  static void child() {
    Recorder& self = recorder();
    self.enabled_ = false;
    self.writing_to_ = nullptr;
    if (self.events_ != nullptr) {
      self.events_->abandon();
      static_cast<void>(self.events_.release());  // its thread and mutex cannot be destroyed here
    }
    parent();
  }
};

Recorder::Recorder() = default;

namespace detail {

Recorder* const the_recorder = [] {
  names();  // made before anything can fork
  pthread_atfork(ForkHandlers::prepare, ForkHandlers::parent, ForkHandlers::child);
  return new Recorder;
}();

}  // namespace detail

void Recorder::prefetch() const noexcept {
  __builtin_prefetch(&lock_, 1);
  __builtin_prefetch(&ledger_, 1);
  __builtin_prefetch(&counters_[1], 1);                                // the first GPU's
  __builtin_prefetch(writing_to_.load(std::memory_order_relaxed), 1);  // may be null
}

void Recorder::on_alloc(std::uint64_t address, std::uint64_t size, Device device,
                        std::uint8_t stream, Tag tag) noexcept {
  if (address == 0) return;
  Block block;
  block.address = address;
  block.size = size;
  block.module = tag.module;
  block.op = tag.op;
  block.category = block.base = tag.category;
  block.phase = tag.phase;
  block.device = device;
  block.stream = stream;
  block.thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  insert(block, EventKind::alloc);
}

void Recorder::seed(std::uint64_t address, std::uint64_t size, Device device,
                    std::uint8_t stream) noexcept {
  Block block;
  block.address = address;
  block.size = size;
  block.device = device;
  block.stream = stream;
  block.thread = this_thread().thread_id();
  block.seeded = true;
  const std::lock_guard guard(lock_);
  if (ledger_.find(address) == nullptr) insert(block, EventKind::seed);
}

void Recorder::insert(Block block, EventKind kind) noexcept {
  if (!enabled_) return;
  if (Block* stale = ledger_.find(block.address); stale != nullptr) {
    // A seeded block that was freed behind our back: upstream would not hand out a live address.
    erase(stale, block.phase);
  }
  block.step = physical_.load(std::memory_order_relaxed);
  block.serial = next_serial_++;
  try {
    ledger_.insert(block);
  } catch (const std::bad_alloc&) {
    return;  // the host is out of memory; the block shows as a remainder, and training goes on
  }
  counters_[block.device].add(block.category, block.size, block.phase, block.step);
  write(kind, block, block.phase, block.op);
}

Recorder::Freed Recorder::on_free(std::uint64_t address, Phase phase) noexcept {
  const std::lock_guard guard(lock_);
  Block* block = enabled_ ? ledger_.find(address) : nullptr;
  if (block == nullptr) return {};
  const Device device = block->device;
  const bool closed = erase(block, static_cast<std::uint8_t>(phase));
  return {.known = true, .closed_peak = closed, .device = device};
}

bool Recorder::erase(Block* block, std::uint8_t phase) noexcept {
  DeviceCounters& counters = counters_[block->device];
  const bool closed = close_peak_locked(counters);
  counters.subtract(block->category, block->size);
  write(EventKind::free, *block, phase, block->op);
  if (block->captured) captures_.erase(block->address);
  ledger_.erase(block);
  return closed;
}

bool Recorder::close_peak_locked(DeviceCounters& counters) noexcept {
  if (!counters.peak_is_open()) return false;
  counters.close_peak(unix_ns());
  return true;
}

bool Recorder::close_peak(Device device) noexcept {
  const std::lock_guard guard(lock_);
  return close_peak_locked(counters_[device]);
}

void Recorder::note_upstream_at_peak(Device device, std::int64_t requested, std::int64_t allocated,
                                     std::int64_t reserved) noexcept {
  const std::lock_guard guard(lock_);
  Peak& peak = counters_[device].peak();
  peak.upstream_requested = requested;
  peak.upstream_allocated = allocated;
  peak.upstream_reserved = reserved;
}

void Recorder::on_oom(std::uint64_t size, Device device, Tag tag) noexcept {
  Block request;
  request.size = std::min(size, kMask48);  // more than any machine has
  request.device = device;
  request.category = tag.category;
  request.module = tag.module;
  request.thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  request.step = physical_.load(std::memory_order_relaxed);
  write(EventKind::oom, request, tag.phase, tag.op);
}

bool Recorder::knows(std::uint64_t address) noexcept { return size_of(address) != 0; }

std::uint64_t Recorder::size_of(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  const Block* block = ledger_.find(address);
  return block == nullptr ? 0 : block->size;
}

std::vector<std::uint64_t> Recorder::seeded(Device device) {
  std::vector<std::uint64_t> addresses;
  for (const Block& block : live_blocks()) {
    if (block.seeded && block.device == device) addresses.push_back(block.address);
  }
  return addresses;
}

void Recorder::adopt(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  if (Block* block = ledger_.find(address); block != nullptr) block->seeded = false;
}

std::uint64_t Recorder::retag(std::uint64_t address, std::uint8_t category, std::uint16_t module,
                              std::uint64_t expected) noexcept {
  const std::lock_guard guard(lock_);
  Block* block = ledger_.find(address);
  if (block == nullptr || (expected >> block->base & 1U) == 0) return 0;
  const bool new_module = module != kKeep16 && module != block->module;
  if (block->base == category && !new_module) return 0;
  if (module != kKeep16) block->module = module;
  block->base = category;
  // A captured block keeps its category; the event then says only the module.
  change_category(*block, block->captured ? block->category : category);
  return block->size;
}

void Recorder::change_category(Block& block, std::uint8_t category) noexcept {
  const std::uint8_t before = block.category;
  counters_[block.device].move(before, category, block.size);
  block.category = category;
  write(EventKind::retag, block, phase_of_this_thread(), before);
}

Block* Recorder::find(BlockId id) noexcept {
  Block* block = ledger_.find(id.address);
  return block != nullptr && block->serial == id.serial ? block : nullptr;
}

BlockId Recorder::capture(std::uint64_t address) {
  const std::lock_guard guard(lock_);
  Block* block = ledger_.find(address);
  // Born in forward, or recomputed in backward (activation checkpointing).
  if (block == nullptr || (block->base != kUndecided && block->base != kBackward)) return {};
  if (captures_[block->address]++ == 0) {
    block->captured = 1;
    change_category(*block, kShared);
  }
  return {.address = block->address, .serial = block->serial};
}

void Recorder::release(BlockId id) noexcept {
  const std::lock_guard guard(lock_);
  Block* block = find(id);
  if (block == nullptr || --captures_[id.address] > 0) return;
  captures_.erase(id.address);
  block->captured = 0;
  change_category(*block, block->base);
}

void Recorder::settle(BlockId id, std::int64_t holders) noexcept {
  const std::lock_guard guard(lock_);
  Block* block = find(id);
  if (block == nullptr || !block->captured) return;
  const std::uint8_t category = holders > captures_[id.address] ? kShared : kOpacusOnly;
  if (category != block->category) change_category(*block, category);
}

void Recorder::set_phase(Phase phase) noexcept {
  ThreadTags& tags = this_thread();
  const bool changed = tags.phase() != phase;
  tags.set_phase(phase);
  if (!changed) return;
  const std::lock_guard guard(lock_);
  write_mark(EventKind::phase, static_cast<std::uint8_t>(phase), 0, 0);
}

void Recorder::end_step(bool logical) noexcept {
  if (logical) logical_.fetch_add(1);
  physical_.fetch_add(1);
  const std::uint8_t phase = phase_of_this_thread();
  const std::lock_guard guard(lock_);
  write_mark(EventKind::step, phase, 0, logical_.load());
}

Recorder::Snapshot Recorder::snapshot(const std::string& name) {
  const std::uint16_t op = names().intern(Names::Kind::op, name);
  Snapshot result;
  result.devices.reserve(kMaxDevices);
  const std::lock_guard guard(lock_);
  result.index = snapshots_++;
  result.unix_ns = unix_ns();
  result.step = physical_.load();
  result.logical_step = logical_.load();
  for (std::size_t device = 0; device < kMaxDevices; ++device) {
    if (!counters_[device].seen()) continue;
    result.devices.push_back({.device = static_cast<Device>(device),
                              .requested = counters_[device].total(),
                              .categories = counters_[device].categories()});
  }
  write_mark(EventKind::snapshot, phase_of_this_thread(), op, result.index);
  return result;
}

std::vector<Recorder::DevicePeak> Recorder::peaks() {
  std::vector<DevicePeak> result;
  result.reserve(kMaxDevices);
  const std::lock_guard guard(lock_);
  for (std::size_t device = 0; device < kMaxDevices; ++device) {
    if (!counters_[device].seen()) continue;
    result.push_back({.device = static_cast<Device>(device), .peak = counters_[device].peak()});
  }
  return result;
}

void Recorder::reset_peaks() noexcept {
  const std::uint8_t phase = phase_of_this_thread();
  const std::uint32_t step = physical_step();
  const std::lock_guard guard(lock_);
  for (DeviceCounters& counters : counters_) counters.reset_peak(phase, step);
}

std::vector<Block> Recorder::live_blocks() {
  std::vector<Block> blocks;
  std::size_t expected = 0;
  do {  // memory is asked for outside the lock
    {
      const std::lock_guard guard(lock_);
      expected = ledger_.size();
    }
    blocks.reserve(expected + expected / 8 + 64);
    const std::lock_guard guard(lock_);
    expected = ledger_.size();
    if (expected <= blocks.capacity()) {
      ledger_.for_each([&](const Block& block) { blocks.push_back(block); });
    }
  } while (blocks.size() < expected);
  return blocks;
}

void Recorder::start_events(std::unique_ptr<EventFile> file) {
  const std::lock_guard guard(lock_);
  if (events_ != nullptr) {
    throw std::logic_error("events are being written already; end the running profile first");
  }
  physical_ = logical_ = 0;  // a profile counts its own steps
  events_ = std::move(file);
  writing_to_ = events_.get();
  ledger_.for_each([&](Block& block) {
    block.step = 0;
    write(EventKind::seed, block, block.phase, block.op);
  });
}

std::unique_ptr<EventFile> Recorder::stop_events() noexcept {
  const std::lock_guard guard(lock_);
  writing_to_ = nullptr;
  return std::move(events_);
}

Recorder::EventsStatus Recorder::events_status() {
  const std::lock_guard guard(lock_);
  if (events_ == nullptr) return {};
  return {.recording = true,
          .written = events_->written(),
          .dropped = events_->dropped(),
          .error = events_->error()};
}

void Recorder::write(EventKind kind, const Block& block, std::uint8_t phase,
                     std::uint16_t op) noexcept {
  if (events_ == nullptr) return;
  Event event{};
  event.time = (ticks() - events_->start_ticks()) & kMask48;
  event.kind = static_cast<std::uint8_t>(kind);
  event.category = block.category;
  event.address = block.address & kMask48;
  event.phase = phase;
  event.device = block.device;
  event.size = block.size;
  event.stream = block.stream;
  event.thread = block.thread;
  event.module = block.module;
  event.op = op;
  event.step = kind == EventKind::free || kind == EventKind::retag
                   ? physical_.load(std::memory_order_relaxed)
                   : block.step;
  events_->append(event);
}

void Recorder::write_mark(EventKind kind, std::uint8_t phase, std::uint16_t op,
                          std::uint64_t size) noexcept {
  Block mark;
  mark.size = size;
  mark.thread = this_thread().thread_id();
  mark.step = physical_.load(std::memory_order_relaxed);
  write(kind, mark, phase, op);
}

}  // namespace opacus_memprof
