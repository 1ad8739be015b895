// SPDX-License-Identifier: Apache-2.0
#include "core/recorder.h"

#include <pthread.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <new>
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

// A forked child (a DataLoader worker) shares the parent's file and inherits its locks. So no
// thread may hold one while the process forks, and the child stops recording.
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
    self.log_.abandon();
    parent();
  }
};

Recorder::Recorder() = default;

namespace detail {

Recorder* const process_recorder = [] {
  names();  // made before anything can fork
  pthread_atfork(ForkHandlers::prepare, ForkHandlers::parent, ForkHandlers::child);
  void* memory = hot_memory(sizeof(Recorder));
  return memory == nullptr ? new Recorder : new (memory) Recorder;
}();

}  // namespace detail

void Recorder::seed(std::uint64_t address, std::uint64_t size, Device device,
                    std::uint8_t stream) noexcept {
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  if (live_.find(address) != nullptr) return;
  Block* block = insert(address, size, device, stream, kUnknown, thread);
  if (block == nullptr) return;
  block->seeded = 1;
  log_.write(EventKind::seed, *block, block->phase, block->op, block->step);
}

Block* Recorder::insert_again(Block* block, std::uint8_t phase, std::uint8_t thread) noexcept {
  const std::uint64_t address = block->address;
  erase(block, phase, thread);
  return live_.try_emplace(address).first;
}

PeakId Recorder::forget(BlockId id, Phase phase) noexcept {
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  Block* block = enabled_ ? live_.find(id) : nullptr;
  if (block == nullptr) return kNoPeak;
  return erase(block, static_cast<std::uint8_t>(phase), thread);
}

PeakId Recorder::close_peak(Device device) noexcept {
  const std::lock_guard guard(lock_);
  return live_.close_peak(device);
}

void Recorder::note_upstream_at_peak(PeakId id, std::int64_t requested, std::int64_t allocated,
                                     std::int64_t reserved) noexcept {
  const std::lock_guard guard(lock_);
  Peak& peak = live_.counters(device_of(id)).peak();
  if (peak.id != id) return;
  peak.upstream_requested = requested;
  peak.upstream_allocated = allocated;
  peak.upstream_reserved = reserved;
}

void Recorder::note_reserved(Device device, const ReservedPeak& reserved) noexcept {
  const std::lock_guard guard(lock_);
  ReservedPeak& peak = live_.counters(device).reserved();
  if (!enabled_ || reserved.bytes <= peak.bytes) return;
  peak = reserved;
  ++reserved_version_;
}

bool Recorder::has_block(std::uint64_t address) noexcept { return size_of(address) != 0; }

std::uint64_t Recorder::size_of(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  const Block* block = live_.find(address);
  return block == nullptr ? 0 : block->size();
}

std::uint16_t Recorder::module_of(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  const Block* block = live_.find(address);
  return block == nullptr ? std::uint16_t{0} : block->module;
}

void Recorder::adopt(std::uint64_t address) noexcept {
  const std::lock_guard guard(lock_);
  if (Block* block = live_.find(address); block != nullptr) block->seeded = false;
}

std::uint64_t Recorder::retag(std::uint64_t address, std::uint8_t category, std::uint16_t module,
                              std::uint64_t expected) noexcept {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = live_.find(address);
  if (block == nullptr || (expected >> block->base() & 1U) == 0) return 0;
  const bool new_module = module != kKeep16 && module != block->module;
  if (block->base() == category && !new_module) return 0;
  if (module != kKeep16) block->module = module;
  // A captured block keeps its category; the event then contains only the module.
  change_category(*block, block->captured ? block->category() : category, category, thread);
  return block->size();
}

void Recorder::change_category(Block& block, std::uint8_t category, std::uint8_t base,
                               const ThreadTags& thread) noexcept {
  const std::uint8_t before = block.category();
  live_.change_category(block, category, base);
  log_.write(EventKind::retag, block, static_cast<std::uint8_t>(thread.phase()), before, step());
}

BlockId Recorder::capture(std::uint64_t address) {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = live_.find(address);
  // Born in forward, or recomputed in backward (activation checkpointing).
  if (block == nullptr || (block->base() != kUndecided && block->base() != kBackward)) return {};
  if (live_.capture(*block)) change_category(*block, kShared, block->base(), thread);
  return {.address = block->address, .serial = block->serial};
}

void Recorder::release(BlockId id) noexcept {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = live_.find(id);
  if (block == nullptr || !block->captured || !live_.release(*block)) return;
  change_category(*block, block->base(), block->base(), thread);
}

void Recorder::settle(BlockId id, std::int64_t holders) noexcept {
  const ThreadTags& thread = this_thread();
  const std::lock_guard guard(lock_);
  Block* block = live_.find(id);
  if (block == nullptr || !block->captured) return;
  const std::uint8_t category = holders > live_.captures_of(*block) ? kShared : kOpacusOnly;
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

std::uint64_t Recorder::on_oom(std::uint64_t size, Device device, Tag tag) noexcept {
  constexpr std::uint64_t kLargest = (std::uint64_t{1} << 48U) - 1;  // the largest size in an event
  Block request;
  request.set(std::min(size, kLargest), tag.category, tag.category);
  request.device = device;
  request.module = tag.module;
  request.thread = this_thread().thread_id();
  std::list<Failure> failure;  // memory is allocated outside the lock, and freed there
  try {
    failure.push_back({.requested = size,
                       .unix_ns = unix_ns(),
                       .device = device,
                       .tag = tag,
                       .holdings = holdings_of(live_blocks(), device)});
  } catch (const std::bad_alloc&) {  // on the CPU the host's memory may have run out
  }
  const std::lock_guard guard(lock_);
  log_.write(EventKind::oom, request, tag.phase, tag.op, step());
  for (Failure& entry : failure) {
    entry.step = step();
    entry.logical_step = logical_.load();
  }
  return failures_.add(failure);
}

void Recorder::note_upstream_at_failure(std::uint64_t number,
                                        const UpstreamAtFailure& upstream) noexcept {
  const std::lock_guard guard(lock_);
  failures_.set_upstream(number, upstream);
}

void Recorder::write_mark(EventKind kind, const ThreadTags& thread, std::uint8_t phase,
                          std::uint16_t op, std::uint64_t size) noexcept {
  Block mark;
  mark.set(size, 0, 0);
  mark.thread = thread.thread_id();
  log_.write(kind, mark, phase, op, step());
}

}  // namespace opacus_memprof
