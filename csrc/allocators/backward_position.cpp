// SPDX-License-Identifier: Apache-2.0
#include "allocators/backward_position.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/Type.h>
#include <pthread.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "core/id_cache.h"
#include "core/names.h"
#include "core/recorder.h"
#include "core/spin_lock.h"

namespace opacus_memprof {

namespace {

// From sequence number `begin` on, new nodes belong to `module`, until the next boundary.
struct Boundary {
  std::uint64_t begin;
  std::uint16_t module;
};

// Boundaries in ascending order of their numbers. Not thread safe.
class SequenceRanges {
 public:
  void begin(std::uint64_t sequence, std::uint16_t module) {
    while (!boundaries_.empty() && boundaries_.back().begin >= sequence) boundaries_.pop_back();
    if (boundaries_.size() >= kKept) {
      boundaries_.erase(boundaries_.begin(), boundaries_.begin() + kKept / 2);
    }
    boundaries_.push_back({.begin = sequence, .module = module});
  }

  // `hint` is the position of the caller's last number. Backward goes through the numbers downwards
  // from the newest, so the search goes down in growing steps: the next range is near.
  [[nodiscard]] SequenceRange find(std::uint64_t sequence, std::size_t hint) const noexcept {
    if (boundaries_.empty() || sequence < boundaries_.front().begin) return {};
    std::size_t low = std::min(hint, boundaries_.size() - 1);
    if (const SequenceRange same = range(low); same.holds(sequence)) return same;
    if (boundaries_[low].begin < sequence) low = boundaries_.size() - 1;  // another pass
    std::size_t high = boundaries_.size();
    for (std::size_t step = 1; boundaries_[low].begin > sequence; step *= 2) {
      high = low;
      low -= std::min(low, step);
    }
    const auto after = std::upper_bound(
        boundaries_.begin() + static_cast<std::ptrdiff_t>(low),
        boundaries_.begin() + static_cast<std::ptrdiff_t>(high), sequence,
        [](std::uint64_t value, const Boundary& boundary) { return value < boundary.begin; });
    return range(static_cast<std::size_t>(after - boundaries_.begin()) - 1);
  }

 private:
  [[nodiscard]] SequenceRange range(std::size_t at) const noexcept {
    return {.begin = boundaries_[at].begin,
            .end = at + 1 < boundaries_.size() ? boundaries_[at + 1].begin : UINT64_MAX,
            .place = static_cast<std::uint32_t>(at),
            .module = boundaries_[at].module};
  }

  static constexpr std::size_t kKept = std::size_t{1} << 17U;
  std::vector<Boundary> boundaries_;
};

// The ranges of every thread that runs forwards: each thread numbers its own nodes, and a node
// knows its thread. (Reentrant activation checkpointing recomputes on autograd's thread.)
class ForwardThreads {
 public:
  // Begins a range of the calling thread, from `sequence` on.
  void begin(std::uint64_t sequence, std::uint16_t module) {
    thread_local ThreadRegistration registration(*this);
    const std::lock_guard guard(lock_);
    registration.ranges->begin(sequence, module);
    count_change();
  }

  // Counts the ranges that began or were dropped. Never 0, so that 0 can mean that there was no
  // look-up.
  [[nodiscard]] std::uint32_t changes() const noexcept {
    return changes_.load(std::memory_order_relaxed);
  }

  [[nodiscard]] SequenceRange find(std::uint64_t thread, std::uint64_t sequence,
                                   std::size_t hint) noexcept {
    const std::lock_guard guard(lock_);
    const auto found = threads_.find(thread);
    return found == threads_.end() ? SequenceRange{} : found->second.find(sequence, hint);
  }

  // For pthread_atfork: no thread holds the lock while the process forks.
  void lock() noexcept { lock_.lock(); }
  void unlock() noexcept { lock_.unlock(); }

 private:
  // Registers a thread for its lifetime. Its ranges outlive it, because its graph may.
  struct ThreadRegistration {
    explicit ThreadRegistration(ForwardThreads& threads)
        : all(threads),
          thread(at::RecordFunction::currentThreadId()),
          ranges(threads.register_thread(thread)) {}
    ThreadRegistration(const ThreadRegistration&) = delete;
    ThreadRegistration& operator=(const ThreadRegistration&) = delete;
    ~ThreadRegistration() { all.unregister_thread(thread); }

    ForwardThreads& all;
    std::uint64_t thread;
    SequenceRanges* ranges;
  };

  SequenceRanges* register_thread(std::uint64_t thread) {
    const std::lock_guard guard(lock_);
    return &threads_[thread];  // an unordered_map does not move its values
  }

  void unregister_thread(std::uint64_t thread) {
    const std::lock_guard guard(lock_);
    ended_.push_back(thread);
    if (ended_.size() <= kKept) return;
    threads_.erase(ended_.front());
    ended_.pop_front();
    count_change();
  }

  void count_change() noexcept {  // under the lock
    changes_.store(changes() + 1, std::memory_order_relaxed);
  }

  static constexpr std::size_t kKept = 64;  // threads that have ended
  SpinLock lock_;
  std::unordered_map<std::uint64_t, SequenceRanges> threads_;
  std::deque<std::uint64_t> ended_;
  std::atomic<std::uint32_t> changes_{1};
};

ForwardThreads& forward_threads() {
  static auto* const instance = [] {
    const auto release = [] { forward_threads().unlock(); };
    // Its lock is a leaf: it may be taken before or after the recorder's and that of the names.
    pthread_atfork([] { forward_threads().lock(); }, release, release);
    return new ForwardThreads;
  }();
  return *instance;
}

// Returns the module whose forward made the node. Most nodes belong to the same module as the
// previous one, so its range is checked first.
[[gnu::hot]] std::uint16_t module_of(ThreadTags::LastNode& last, const torch::autograd::Node& node,
                                     std::uint64_t sequence) noexcept {
  constexpr std::uint64_t kAccumulateGrad = UINT64_MAX;  // belongs to no forward
  if (sequence == kAccumulateGrad) return 0;
  ForwardThreads& threads = forward_threads();
  const std::uint64_t thread = node.thread_id();
  const std::uint32_t changes = threads.changes();
  if (!last.range.holds(sequence) || last.forward_thread != thread ||
      last.range_changes != changes) {
    last.range = threads.find(thread, sequence, last.range.place);
    last.forward_thread = thread;
    last.range_changes = changes;
  }
  return last.range.module;
}

// There are few node types: each is named once, then found by its type's address. (A node's own
// name() may need Python, and builds a string each time.)
class OpNames {
 public:
  std::uint16_t id_of(const torch::autograd::Node& node) {
    const std::type_info& type = typeid(node);
    return ids_.id_of(&type, [&] { return names().intern(Names::Kind::op, short_name(type)); });
  }

 private:
  static std::string short_name(const std::type_info& type) {
    std::string name = c10::demangle(type.name());
    if (const auto colons = name.rfind("::"); colons != std::string::npos) {
      name.erase(0, colons + 2);
    }
    return name;
  }

  IdCache ids_;
};

OpNames op_names;

}  // namespace

int backward_task() noexcept {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task >= 0) backward_state.note(task);
  return task;
}

namespace {

// Returns the position inside this graph task. A separate function, because most callers are in no
// task and then save no registers.
[[gnu::hot, gnu::noinline]] const BackwardPosition& position_in(int task) {
  const auto node = torch::autograd::get_current_node();
  ThreadTags::LastNode& last = this_thread().last_node;
  if (node == nullptr) {
    last.node = nullptr;
    last.position = {.task = task};
    return last.position;
  }

  // A node usually allocates more than once.
  const std::uint64_t sequence = node->sequence_nr();
  if (last.node != node.get() || last.sequence != sequence || last.position.task != task) {
    last.node = node.get();
    last.sequence = sequence;
    last.position = {
        .task = task, .module = module_of(last, *node, sequence), .op = op_names.id_of(*node)};
  }
  return last.position;
}

}  // namespace

[[gnu::hot]] const BackwardPosition& backward_position() {
  static constexpr BackwardPosition kOutside;
  const int task = backward_task();
  return task < 0 ? kOutside : position_in(task);
}

ModuleScope::ModuleScope(std::uint16_t module)
    : tags_(this_thread()), depth_(tags_.depth()), recomputes_(backward_task() >= 0) {
  if (tags_.phase() != Phase::forward && tags_.top().phase == kKeep8 && !recomputes_) {
    recorder().set_phase(Phase::forward);
  }
  tags_.begin_forward();
  tags_.push({.module = module});
  forward_threads().begin(at::sequence_number::peek(), module);
}

ModuleScope::~ModuleScope() {
  tags_.unwind(depth_);
  tags_.end_forward(recomputes_);
  if (failed_ && tags_.outside_forwards() && !recomputes_) recorder().set_phase(Phase::idle);
  const std::uint16_t outer = tags_.top().module;
  forward_threads().begin(at::sequence_number::peek(), outer == kKeep16 ? std::uint16_t{0} : outer);
}

}  // namespace opacus_memprof
