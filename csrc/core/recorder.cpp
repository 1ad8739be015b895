// SPDX-License-Identifier: Apache-2.0
#include "core/recorder.h"

#include <pthread.h>

#include <list>
#include <mutex>
#include <new>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core/clock.h"
#include "core/hot_memory.h"
#include "core/names.h"

namespace opacus_memprof {

namespace {

constexpr auto kUndecided = static_cast<std::uint8_t>(Category::forward_undecided);
constexpr auto kBackward = static_cast<std::uint8_t>(Category::backward_temporaries);
constexpr auto kShared = static_cast<std::uint8_t>(Category::activation_hooks_shared);
constexpr auto kOpacusOnly = static_cast<std::uint8_t>(Category::activation_hooks_opacus_only);

constexpr Tag kUnknown{.category = static_cast<std::uint8_t>(Category::unattributed),
                       .phase = static_cast<std::uint8_t>(Phase::idle),
                       .module = 0,
                       .op = 0};

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
  void* memory = hot_memory(sizeof(Recorder));
  return memory == nullptr ? new Recorder : new (memory) Recorder;
}();

}  // namespace detail

void Recorder::on_alloc(std::uint64_t address, std::uint64_t size, Device device,
                        std::uint8_t stream, const Tag& tag) noexcept {
  if (address == 0) return;
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  const Block* block = insert(address, size, device, stream, tag, thread);
  if (block != nullptr) write(EventKind::alloc, *block, tag.phase, tag.op, block->step);
}

void Recorder::seed(std::uint64_t address, std::uint64_t size, Device device,
                    std::uint8_t stream) noexcept {
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  if (ledger_.find(address) != nullptr) return;
  Block* block = insert(address, size, device, stream, kUnknown, thread);
  if (block == nullptr) return;
  block->seeded = 1;
  write(EventKind::seed, *block, block->phase, block->op, block->step);
}

Block* Recorder::insert(std::uint64_t address, std::uint64_t size, Device device,
                        std::uint8_t stream, const Tag& tag, std::uint8_t thread) noexcept {
  if (!enabled_) return nullptr;
  Block* block = nullptr;
  bool added = false;
  try {
    std::tie(block, added) = ledger_.try_emplace(address);
    if (!added) [[unlikely]] {
      // A seeded block that was freed behind our back: upstream would not hand out a live address.
      erase(block, tag.phase, thread);
      block = ledger_.try_emplace(address).first;
    }
  } catch (const std::bad_alloc&) {
    return nullptr;  // the host is out of memory; the block shows as a remainder, training goes on
  }
  block->set(size, tag.category, tag.category);
  block->step = physical_.load(std::memory_order_relaxed);
  block->serial = next_serial_++;
  block->module = tag.module;
  block->op = tag.op;
  block->device = device;
  block->stream = stream;
  block->thread = thread;
  block->phase = tag.phase;
  counters_[device].add(tag.category, size, tag.phase, block->step);
  return block;
}

int Recorder::on_free(std::uint64_t address, Phase phase) noexcept {
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  Block* block = enabled_ ? ledger_.find(address) : nullptr;
  if (block == nullptr) return kNoPeak;
  const int device = block->device;
  return erase(block, static_cast<std::uint8_t>(phase), thread) ? device : kNoPeak;
}

bool Recorder::erase(Block* block, std::uint8_t phase, std::uint8_t thread) noexcept {
  DeviceCounters& counters = counters_[block->device];
  const bool closed = close_peak_locked(counters);
  counters.subtract(block->category(), block->size());
  block->thread = thread;
  write(EventKind::free, *block, phase, block->op, physical_.load(std::memory_order_relaxed));
  if (block->captured && !more_captures_.empty()) more_captures_.erase(block->address);
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

bool Recorder::knows(std::uint64_t address) noexcept { return size_of(address) != 0; }

std::uint64_t Recorder::size_of(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  const Block* block = ledger_.find(address);
  return block == nullptr ? 0 : block->size();
}

std::uint16_t Recorder::module_of(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  const Block* block = ledger_.find(address);
  return block == nullptr ? std::uint16_t{0} : block->module;
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
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = ledger_.find(address);
  if (block == nullptr || (expected >> block->base() & 1U) == 0) return 0;
  const bool new_module = module != kKeep16 && module != block->module;
  if (block->base() == category && !new_module) return 0;
  if (module != kKeep16) block->module = module;
  // A captured block keeps its category; the event then says only the module.
  change_category(*block, block->captured ? block->category() : category, category, thread);
  return block->size();
}

void Recorder::change_category(Block& block, std::uint8_t category, std::uint8_t base,
                               const ThreadTags& thread) noexcept {
  const std::uint8_t before = block.category();
  counters_[block.device].move(before, category, block.size());
  block.set(block.size(), category, base);
  write(EventKind::retag, block, static_cast<std::uint8_t>(thread.phase()), before,
        physical_.load(std::memory_order_relaxed));
}

Block* Recorder::find(BlockId id) noexcept {
  Block* block = ledger_.find(id.address);
  return block != nullptr && block->serial == id.serial ? block : nullptr;
}

std::uint32_t Recorder::captures_of(const Block& block) const noexcept {
  if (!block.captured) return 0;
  const auto more = more_captures_.find(block.address);
  return more == more_captures_.end() ? 1 : 1 + more->second;
}

BlockId Recorder::capture(std::uint64_t address) {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = ledger_.find(address);
  // Born in forward, or recomputed in backward (activation checkpointing).
  if (block == nullptr || (block->base() != kUndecided && block->base() != kBackward)) return {};
  if (block->captured) {
    ++more_captures_[block->address];
  } else {
    block->captured = 1;
    change_category(*block, kShared, block->base(), thread);
  }
  return {.address = block->address, .serial = block->serial};
}

void Recorder::release(BlockId id) noexcept {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = find(id);
  if (block == nullptr || !block->captured) return;
  if (captures_of(*block) > 1) {
    const auto more = more_captures_.find(id.address);
    if (--more->second == 0) more_captures_.erase(more);
    return;
  }
  block->captured = 0;
  change_category(*block, block->base(), block->base(), thread);
}

void Recorder::settle(BlockId id, std::int64_t holders) noexcept {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = find(id);
  if (block == nullptr || !block->captured) return;
  const std::uint8_t category = holders > captures_of(*block) ? kShared : kOpacusOnly;
  if (category != block->category()) change_category(*block, category, block->base(), thread);
}

void Recorder::set_phase(Phase phase) noexcept {
  ThreadTags& tags = this_thread();
  const bool changed = tags.phase() != phase;
  tags.set_phase(phase);
  if (!changed) return;
  const std::lock_guard guard(lock_);
  write_mark(EventKind::phase, tags, static_cast<std::uint8_t>(phase), 0, 0);
}

void Recorder::end_step(bool logical) noexcept {
  if (logical) logical_.fetch_add(1);
  physical_.fetch_add(1);
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  write_mark(EventKind::step, thread, static_cast<std::uint8_t>(thread.phase()), 0,
             logical_.load());
}

// Memory for the devices is reserved: nothing is allocated under the lock.
void Recorder::read_counters(State& state) const noexcept {
  state.unix_ns = unix_ns();
  state.step = physical_.load();
  state.logical_step = logical_.load();
  for (std::size_t device = 0; device < kMaxDevices; ++device) {
    const DeviceCounters& counters = counters_[device];
    if (!counters.seen()) continue;
    state.devices.push_back({.device = static_cast<Device>(device),
                             .requested = counters.total(),
                             .highest = counters.highest(),
                             .phase = counters.newest_phase(),
                             .categories = counters.categories()});
  }
}

Recorder::State Recorder::state() {
  State result;
  result.devices.reserve(kMaxDevices);
  const std::lock_guard guard(lock_);
  read_counters(result);
  return result;
}

Recorder::Snapshot Recorder::snapshot(const std::string& name) {
  const std::uint16_t op = names().intern(Names::Kind::op, name);
  const ThreadTags& thread = this_thread();
  Snapshot result;
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
  for (std::size_t device = 0; device < kMaxDevices; ++device) {
    if (!counters_[device].seen()) continue;
    result.push_back({.device = static_cast<Device>(device), .peak = counters_[device].peak()});
  }
  return result;
}

void Recorder::reset_peaks() noexcept {
  const auto phase = static_cast<std::uint8_t>(this_thread().phase());
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
  std::list<Failure> forgotten;
  const std::lock_guard guard(lock_);
  if (events_ != nullptr) {
    throw std::logic_error("events are being written already; end the running profile first");
  }
  physical_ = logical_ = 0;  // a profile counts its own steps
  forgotten.swap(failures_);
  failures_seen_ = 0;
  events_ = std::move(file);
  writing_to_ = events_.get();
  ledger_.for_each([&](Block& block) {
    block.step = 0;
    write(EventKind::seed, block, block.phase, block.op, block.step);
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

void Recorder::write(EventKind kind, const Block& block, std::uint8_t phase, std::uint16_t op,
                     std::uint32_t step) noexcept {
  if (events_ == nullptr) return;
  events_->append(
      {event_word(ticks() - events_->start_ticks(), static_cast<std::uint8_t>(kind),
                  block.category()),
       event_word(block.address, phase, block.device),
       event_word(block.size(), block.stream, block.thread),
       std::uint64_t{block.module} | std::uint64_t{op} << 16U | std::uint64_t{step} << 32U});
}

void Recorder::write_mark(EventKind kind, const ThreadTags& thread, std::uint8_t phase,
                          std::uint16_t op, std::uint64_t size) noexcept {
  Block mark;
  mark.set(size, 0, 0);
  mark.thread = thread.thread_id();
  write(kind, mark, phase, op, physical_.load(std::memory_order_relaxed));
}

}  // namespace opacus_memprof
