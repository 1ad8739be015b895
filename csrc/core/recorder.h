// SPDX-License-Identifier: Apache-2.0
// The only entry for reports of allocators and hooks. Keeps the ledger, the counters and the event
// file consistent under one lock, so that snapshots are consistent and events are totally ordered.
//
// Allocators call on_alloc after the upstream allocator has allocated, and on_free before it frees,
// because an address may be handed out again immediately.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/event_log.h"
#include "core/failures.h"
#include "core/live_memory.h"
#include "core/spin_lock.h"
#include "core/tag_stack.h"

namespace opacus_memprof {

class Recorder {
 public:
  Recorder();

  // --- from allocators. `tag` comes from ThreadTags::resolve. ---
  // (Small structs of narrow fields are not passed or returned by value here: they would be
  // composed in memory and then read as one word, which waits for the stores.)
  //
  // Called before upstream allocates, and first of all in a free: fetches data in parallel that
  // would otherwise be fetched one after the other.
  void prefetch() const noexcept;
  // The address to prefetch before a call for this block. (gcc 12 drops calls of functions that
  // only prefetch.)
  [[nodiscard]] const void* prefetch_address(std::uint64_t address) const noexcept {
    return live_.prefetch_address(address);
  }
  // Returns false in a forked child, whose blocks are not recorded.
  [[nodiscard]] bool is_recording() const noexcept { return enabled_; }
  // Returns whether events are being written. They need stream, module and op; counters do not.
  [[nodiscard]] bool writes_events() const noexcept { return log_.is_open(); }
  void on_alloc(std::uint64_t address, std::uint64_t size, Device device, std::uint8_t stream,
                const Tag& tag) noexcept;
  // `phase` is the phase of the freeing thread. Returns the peak that this free has ended, so that
  // upstream can be asked for its counts now, or kNoPeak.
  PeakId on_free(std::uint64_t address, Phase phase) noexcept;
  // Does what on_free does, for a block whose free was not seen: the id distinguishes it from a
  // later one at its address.
  PeakId forget(BlockId id, Phase phase) noexcept;
  // Adds a block that existed before the profiler.
  void seed(std::uint64_t address, std::uint64_t size, Device device, std::uint8_t stream) noexcept;
  // Records a failed allocation. Adds up the device's live blocks by origin; returns the failure's
  // number.
  std::uint64_t on_oom(std::uint64_t size, Device device, Tag tag) noexcept;
  void note_upstream_at_failure(std::uint64_t number, const UpstreamAtFailure& upstream) noexcept;
  // Records upstream's counts at the peak that was just closed. Ignored if another peak has been
  // closed since then: other threads continue while upstream is asked.
  void note_upstream_at_peak(PeakId peak, std::int64_t requested, std::int64_t allocated,
                             std::int64_t reserved) noexcept;
  // Records that upstream has reserved so much, if it is the most since the peaks were reset.
  void note_reserved(Device device, const ReservedPeak& reserved) noexcept;
  // Closes the peak that no free has ended yet and returns it, so that upstream can be asked for
  // its counts; or kNoPeak.
  PeakId close_peak(Device device) noexcept;
  [[nodiscard]] bool has_block(std::uint64_t address) noexcept;
  [[nodiscard]] std::uint64_t size_of(std::uint64_t address) noexcept;    // 0 if unknown
  [[nodiscard]] std::uint16_t module_of(std::uint64_t address) noexcept;  // 0 if unknown
  // Marks the block: its free will be reported from now on.
  void adopt(std::uint64_t address) noexcept;

  // --- from hooks ---
  // Returns the block's bytes if its category (or module) changed, otherwise 0. `module` may be
  // kKeep16. With `expected` (one bit per category) blocks of other categories do not change.
  static constexpr std::uint64_t kAnyCategory = ~std::uint64_t{0};
  [[gnu::hot, gnu::flatten]] std::uint64_t retag(std::uint64_t address, std::uint8_t category,
                                                 std::uint16_t module,
                                                 std::uint64_t expected = kAnyCategory) noexcept;
  // Records that Opacus holds the block as a captured activation. A serial of 0 means that it is
  // not a block that can be captured.
  [[gnu::hot]] BlockId capture(std::uint64_t address);
  [[gnu::hot]] void release(BlockId id) noexcept;
  // Decides whether Opacus alone holds the captured block, or autograd as well. `holders` is the
  // number of references to its storage.
  [[gnu::hot]] void settle(BlockId id, std::int64_t holders) noexcept;

  void set_phase(Phase phase) noexcept;  // of the calling thread
  void end_step(bool logical) noexcept;
  [[nodiscard]] std::uint32_t physical_step() const noexcept { return physical_.load(); }
  [[nodiscard]] std::uint32_t logical_step() const noexcept { return logical_.load(); }

  // --- for sessions ---
  struct DeviceBytes {
    Device device = 0;
    std::int64_t requested = 0;
    CategoryBytes categories{};
  };
  struct DeviceState : DeviceBytes {
    std::int64_t highest = 0;  // since the peaks were reset
    std::uint8_t phase = 0;    // of the newest allocation
    ReservedPeak reserved;
  };
  struct State {
    std::uint64_t unix_ns = 0;
    std::uint32_t step = 0;
    std::uint32_t logical_step = 0;
    std::vector<DeviceState> devices;  // devices that ever had a block
  };
  struct Snapshot : State {
    std::string name;
    std::uint64_t index = 0;
  };
  // Does what a snapshot does, without an event.
  State state();
  Snapshot snapshot(const std::string& name);
  struct DevicePeak : Peak {
    Device device = 0;
    ReservedPeak reserved;
  };
  std::vector<DevicePeak> peaks();
  void reset_peaks() noexcept;
  // Changes when a device's reserved peak does.
  [[nodiscard]] std::uint64_t reserved_version() const noexcept { return reserved_version_.load(); }
  std::vector<Block> live_blocks();
  // The newest failures since events were started, the newest last; at most
  // FailureLog::kMaxFailures.
  std::vector<Failure> failures();

  // Starts events. Steps count from 0 again; live blocks are written to the file as seeds. Throws
  // std::logic_error if events are being written already.
  void start_events(std::unique_ptr<EventFile> file);
  // Returns the file, which its owner closes outside the lock; nullptr if there was none.
  std::unique_ptr<EventFile> stop_events() noexcept;
  EventLog::Status events_status();
  // Waits until the files have every event so far. Must not run while another thread ends the file.
  void flush_events();
  // EventFile::Calls::live_blocks.
  std::vector<Block> resume_after_loss(EventFile& file);

 private:
  friend struct ForkHandlers;
  // These get the calling thread's tags as an argument. Calling this_thread() under the lock is not
  // allowed: its first call creates the thread's tags, and takes the lock of the names (see the
  // order in ForkHandlers).
  void write_mark(EventKind kind, const ThreadTags& thread, std::uint8_t phase, std::uint16_t op,
                  std::uint64_t size) noexcept;
  [[gnu::hot]] void change_category(Block& block, std::uint8_t category, std::uint8_t base,
                                    const ThreadTags& thread) noexcept;
  Block* insert(std::uint64_t address, std::uint64_t size, Device device, std::uint8_t stream,
                const Tag& tag, std::uint8_t thread) noexcept;
  PeakId erase(Block* block, std::uint8_t phase, std::uint8_t thread) noexcept;
  // For a seeded block that was freed unseen: upstream would not hand out a live address.
  [[gnu::cold]] Block* insert_again(Block* block, std::uint8_t phase, std::uint8_t thread) noexcept;
  void read_counters(State& state) noexcept;
  template <typename Then>  // called under the same lock
  std::vector<Block> copy_blocks(Then then);
  [[nodiscard]] std::uint32_t step() const noexcept {
    return physical_.load(std::memory_order_relaxed);
  }

  // The members that every allocation uses come first, on two lines.
  alignas(64) SpinLock lock_;
  bool enabled_ = true;  // changes only in a child, while it has one thread
  EventLog log_;
  std::atomic<std::uint32_t> physical_{0};
  LiveMemory live_;

  std::uint64_t snapshots_ = 0;
  FailureLog failures_;
  std::atomic<std::uint32_t> logical_{0};
  std::atomic<std::uint64_t> reserved_version_{0};
};

namespace detail {
extern Recorder* const process_recorder;
}

// The process' recorder; never destroyed, because blocks may outlive static destruction.
inline Recorder& recorder() { return *detail::process_recorder; }

inline void Recorder::prefetch() const noexcept {
  __builtin_prefetch(&lock_, 1);
  __builtin_prefetch(&live_, 1);
  __builtin_prefetch(live_.first_gpu(), 1);
  // Not for a null pointer: the page table walk for address 0 costs more than the prefetch may
  // save.
  if (const EventFile* file = log_.file()) __builtin_prefetch(file, 1);
  __builtin_prefetch(&this_thread());
  __builtin_prefetch(&backward_state);
}

// --- the code that every allocation and free runs ---

inline Block* Recorder::insert(std::uint64_t address, std::uint64_t size, Device device,
                               std::uint8_t stream, const Tag& tag, std::uint8_t thread) noexcept {
  if (!enabled_) return nullptr;
  auto [block, added] = live_.try_emplace(address);
  // Without memory on the host, the block becomes a part of the remainder, and training continues.
  if (block == nullptr) [[unlikely]]
    return nullptr;
  if (!added) [[unlikely]]
    block = insert_again(block, tag.phase, thread);
  block->set(size, tag.category, tag.category);
  block->step = step();
  block->module = tag.module;
  block->op = tag.op;
  block->device = device;
  block->stream = stream;
  block->thread = thread;
  block->phase = tag.phase;
  live_.add(*block);
  return block;
}

inline PeakId Recorder::erase(Block* block, std::uint8_t phase, std::uint8_t thread) noexcept {
  const PeakId closed = live_.subtract(*block);
  block->thread = thread;
  log_.write(EventKind::free, *block, phase, block->op, step());
  live_.erase(block);
  return closed;
}

inline void Recorder::on_alloc(std::uint64_t address, std::uint64_t size, Device device,
                               std::uint8_t stream, const Tag& tag) noexcept {
  if (address == 0) return;
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  const Block* block = insert(address, size, device, stream, tag, thread);
  if (block != nullptr) log_.write(EventKind::alloc, *block, tag.phase, tag.op, block->step);
}

inline PeakId Recorder::on_free(std::uint64_t address, Phase phase) noexcept {
  const std::uint8_t thread = this_thread().thread_id();
  const std::lock_guard guard(lock_);
  Block* block = enabled_ ? live_.find(address) : nullptr;
  if (block == nullptr) return kNoPeak;
  return erase(block, static_cast<std::uint8_t>(phase), thread);
}

}  // namespace opacus_memprof
