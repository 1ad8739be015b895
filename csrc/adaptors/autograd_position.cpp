// SPDX-License-Identifier: Apache-2.0
#include "adaptors/autograd_position.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <typeinfo>
#include <vector>

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

// Boundaries in rising order of their numbers. Not thread safe.
class SequenceRanges {
 public:
  void begin(std::uint64_t sequence, std::uint16_t module) {
    while (!boundaries_.empty() && boundaries_.back().begin >= sequence) boundaries_.pop_back();
    if (boundaries_.size() >= kKept) {
      boundaries_.erase(boundaries_.begin(), boundaries_.begin() + kKept / 2);
    }
    boundaries_.push_back({.begin = sequence, .module = module});
  }

  // `hint` is where the caller found its last number. Backward runs through the numbers downwards
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

// Of forwards outside backward; written by the training thread, read by autograd's.
struct Forward {
  SpinLock lock;
  SequenceRanges ranges;
  std::atomic<std::uint32_t> changes{1};  // 0 is none that anybody has seen
};

Forward& forward() {
  static auto* const instance = new Forward;
  return *instance;
}

// Of forwards inside backward (reentrant activation checkpointing recomputes on autograd's thread
// and then runs a nested graph task there). Numbers are the thread's own, so these ranges are too.
SequenceRanges& recomputed() {
  thread_local SequenceRanges instance;
  return instance;
}

void begin_range(ThreadTags& tags, int task, std::uint16_t module) {
  const std::uint64_t sequence = at::sequence_number::peek();
  if (task >= 0) {
    ThreadTags::Recomputation& outer = tags.recomputation;
    const std::uint32_t changes = forward().changes.load(std::memory_order_relaxed);
    const bool known = task >= outer.task && changes == outer.changes;  // the same, or nested in it
    if (!known) {
      const auto node = torch::autograd::get_current_node();
      outer = {.task = task,
               .node = node == nullptr ? 0 : node->sequence_nr(),
               .begin = sequence,
               .changes = changes};
    }
    recomputed().begin(sequence, module);
  } else {
    const std::lock_guard guard(forward().lock);
    forward().ranges.begin(sequence, module);
    std::atomic<std::uint32_t>& changes = forward().changes;
    changes.store(changes.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

// Whether the node was made by a recomputation: a graph task nested in the recomputing node's runs
// it, until another node of that task runs. A later pass has a higher task as well; should the end
// of the recomputation have gone unseen, the pass begins with a forward or with older nodes.
bool recomputed_here(ThreadTags& tags, int task, std::uint64_t sequence) noexcept {
  ThreadTags::Recomputation& outer = tags.recomputation;
  if (task == outer.task && sequence != outer.node) outer = {};
  return task > outer.task && sequence >= outer.begin && sequence < at::sequence_number::peek() &&
         outer.changes == forward().changes.load(std::memory_order_relaxed);
}

// Whose forward made the node. Most nodes are of the same module as the one before.
[[gnu::hot]] std::uint16_t module_of(ThreadTags& tags, int task, std::uint64_t sequence) noexcept {
  constexpr std::uint64_t kAccumulateGrad = UINT64_MAX;  // belongs to no forward
  if (sequence == kAccumulateGrad) return 0;
  SequenceRange& last = tags.last_node.range;
  if (recomputed_here(tags, task, sequence)) {
    last = recomputed().find(sequence, last.place);
    tags.last_node.range_changes = 0;
    return last.module;
  }
  Forward& all = forward();
  if (last.holds(sequence) &&
      tags.last_node.range_changes == all.changes.load(std::memory_order_relaxed)) {
    return last.module;
  }
  const std::lock_guard guard(all.lock);
  last = all.ranges.find(sequence, last.place);
  tags.last_node.range_changes = all.changes.load(std::memory_order_relaxed);
  return last.module;
}

// Node types are few: each is named once, then found by its type's address. (A node's own name()
// may need Python, and builds a string each time.) A slot is a type's address above its op's id, so
// that one load reads both.
class OpNames {
 public:
  std::uint16_t of(const torch::autograd::Node& node) {
    const std::type_info& type = typeid(node);
    const auto address = reinterpret_cast<std::uint64_t>(&type);
    std::atomic<std::uint64_t>& slot = slots_[(address >> 4U) % slots_.size()];
    const std::uint64_t known = slot.load(std::memory_order_relaxed);
    if (known >> 16U == (address & kAddressBits)) return static_cast<std::uint16_t>(known);
    const std::uint16_t id = names().intern(Names::Kind::op, short_name(type));
    slot.store(address << 16U | id, std::memory_order_relaxed);
    return id;
  }

 private:
  static constexpr std::uint64_t kAddressBits = (std::uint64_t{1} << 48U) - 1;

  static std::string short_name(const std::type_info& type) {
    std::string name = c10::demangle(type.name());
    if (const auto colons = name.rfind("::"); colons != std::string::npos) {
      name.erase(0, colons + 2);
    }
    return name;
  }

  std::array<std::atomic<std::uint64_t>, 256> slots_{};
};

OpNames op_names;

}  // namespace

int backward_task() noexcept {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task >= 0) backward_state.note(task);
  return task;
}

[[gnu::hot]] const BackwardPosition& backward_position() {
  static constexpr BackwardPosition kOutside;
  const int task = backward_task();
  if (task < 0) return kOutside;
  const auto node = torch::autograd::get_current_node();
  ThreadTags& tags = this_thread();
  ThreadTags::LastNode& last = tags.last_node;
  if (node == nullptr) {
    last = {.position = {.task = task}, .range = last.range, .range_changes = last.range_changes};
    return last.position;
  }

  // A node usually allocates more than once.
  const std::uint64_t sequence = node->sequence_nr();
  if (last.node != node.get() || last.sequence != sequence || last.position.task != task) {
    last.node = node.get();
    last.sequence = sequence;
    last.position = {
        .task = task, .module = module_of(tags, task, sequence), .op = op_names.of(*node)};
  }
  return last.position;
}

ModuleScope::ModuleScope(std::uint16_t module)
    : tags_(this_thread()), depth_(tags_.depth()), task_(backward_task()) {
  if (tags_.phase() != Phase::forward && tags_.top().phase == kKeep8 && task_ < 0) {
    recorder().set_phase(Phase::forward);
  }
  tags_.push({.module = module});
  begin_range(tags_, task_, module);
}

ModuleScope::~ModuleScope() {
  tags_.unwind(depth_);
  const std::uint16_t outer = tags_.top().module;
  begin_range(tags_, task_, outer == kKeep16 ? std::uint16_t{0} : outer);
}

}  // namespace opacus_memprof
