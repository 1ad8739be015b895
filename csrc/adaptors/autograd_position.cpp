// SPDX-License-Identifier: Apache-2.0
#include "adaptors/autograd_position.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
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

  // `hint` is where the caller found its last number, and is moved. Backward runs through the
  // numbers downwards, so the next range is the same or a near one below.
  [[nodiscard]] std::uint16_t module_of(std::uint64_t sequence,
                                        std::uint32_t& hint) const noexcept {
    constexpr int kNear = 4;
    if (hint < boundaries_.size()) {
      std::size_t at = hint;
      for (int steps = 0; steps < kNear && at > 0 && boundaries_[at].begin > sequence; ++steps)
        --at;
      const bool below_next = at + 1 == boundaries_.size() || sequence < boundaries_[at + 1].begin;
      if (boundaries_[at].begin <= sequence && below_next) {
        hint = static_cast<std::uint32_t>(at);
        return boundaries_[at].module;
      }
    }
    const auto after = std::upper_bound(
        boundaries_.begin(), boundaries_.end(), sequence,
        [](std::uint64_t value, const Boundary& boundary) { return value < boundary.begin; });
    if (after == boundaries_.begin()) return 0;
    hint = static_cast<std::uint32_t>(std::prev(after) - boundaries_.begin());
    return std::prev(after)->module;
  }

 private:
  static constexpr std::size_t kKept = std::size_t{1} << 17U;
  std::vector<Boundary> boundaries_;
};

// Of forwards outside backward; written by the training thread, read by autograd's.
struct Forward {
  SpinLock lock;
  SequenceRanges ranges;
};

Forward& forward() {
  static auto* const instance = new Forward;
  return *instance;
}

// Of forwards inside backward (reentrant activation checkpointing recomputes on autograd's thread
// and then runs a nested graph task there). Numbers are the thread's own, so these ranges are too.
struct Recomputed {
  SequenceRanges ranges;
  int task = INT_MAX;  // the one that recomputed; its nested tasks have higher ids
};

Recomputed& recomputed() {
  thread_local Recomputed instance;
  return instance;
}

void begin_range(std::uint16_t module) {
  const std::uint64_t sequence = at::sequence_number::peek();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task >= 0) {
    recomputed().task = task;
    recomputed().ranges.begin(sequence, module);
  } else {
    const std::lock_guard guard(forward().lock);
    forward().ranges.begin(sequence, module);
  }
}

std::uint16_t module_of(int task, std::uint64_t sequence, std::uint32_t& hint) noexcept {
  constexpr std::uint64_t kAccumulateGrad = UINT64_MAX;  // belongs to no forward
  if (sequence == kAccumulateGrad) return 0;
  if (task > recomputed().task) return recomputed().ranges.module_of(sequence, hint);
  const std::lock_guard guard(forward().lock);
  return forward().ranges.module_of(sequence, hint);
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

BackwardPosition backward_task() noexcept {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task >= 0) backward_state.note(task);
  return {.task = task};
}

bool in_backward() noexcept { return backward_task().task >= 0; }

BackwardPosition backward_position() {
  const BackwardPosition here = backward_task();
  const int task = here.task;
  if (task < 0) return here;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return here;

  // A node usually allocates more than once.
  ThreadTags::LastNode& last = this_thread().last_node;
  const std::uint64_t sequence = node->sequence_nr();
  if (last.node != node.get() || last.sequence != sequence || last.position.task != task) {
    last.node = node.get();
    last.sequence = sequence;
    last.position = {
        .task = task, .module = module_of(task, sequence, last.range), .op = op_names.of(*node)};
  }
  return last.position;
}

ModuleScope::ModuleScope(std::uint16_t module) : tags_(this_thread()), depth_(tags_.depth()) {
  if (tags_.phase() != Phase::forward && tags_.top().phase == kKeep8 && !in_backward()) {
    recorder().set_phase(Phase::forward);
  }
  tags_.push({.module = module});
  begin_range(module);
}

ModuleScope::~ModuleScope() {
  tags_.unwind(depth_);
  const std::uint16_t outer = tags_.top().module;
  begin_range(outer == kKeep16 ? std::uint16_t{0} : outer);
}

}  // namespace opacus_memprof
