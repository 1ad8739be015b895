// SPDX-License-Identifier: Apache-2.0
// The current activity of this thread: a stack of tags that hooks push and pop, and the thread's
// phase.
//
// Autograd runs a CUDA backward on a separate thread, so a tag set around loss.backward() does not
// reach it. csrc/allocators asks the engine instead and passes the answer as BackwardPosition.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/tag.h"

namespace opacus_memprof {

// The position of autograd's engine on the calling thread.
struct BackwardPosition {
  int task = -1;             // the running graph task; -1 is "not in backward"
  std::uint16_t module = 0;  // the module whose forward made the running node
  std::uint16_t op = 0;      // the node's type
};

// Consecutive nodes that one module's forward made: autograd numbers the nodes of a thread.
struct SequenceRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t place = 0;  // among all ranges
  std::uint16_t module = 0;

  [[nodiscard]] bool holds(std::uint64_t sequence) const noexcept {
    return begin <= sequence && sequence < end;
  }
};

// One thread's tags. Not thread safe; reached through this_thread(). Its first cache line has the
// members that every allocation reads: between two allocations a training step runs enough code to
// evict the others.
class alignas(64) ThreadTags {
  Tag top_;
  std::uint32_t phase_epoch_ = 0;
  Phase phase_ = Phase::idle;
  std::uint8_t thread_id_ = 0;
  std::uint16_t open_forwards_ = 0;
  std::size_t depth_ = 0;

 public:
  ThreadTags();

  // The node that allocated last on this thread, so that each node is looked up once.
  struct LastNode {
    const void* node = nullptr;
    std::uint64_t sequence = 0;
    BackwardPosition position;
    SequenceRange range;
    std::uint64_t forward_thread = 0;  // thread of the range
    std::uint32_t range_changes = 0;   // number of changes of ranges when this one was found
  };
  LastNode last_node;

  void push(Tag tag) noexcept {
    if (depth_ < kDepth) saved_[depth_] = top_;
    ++depth_;
    top_ = merge(top_, tag);
  }
  void pop() noexcept {
    if (depth_ > 0) unwind(depth_ - 1);
  }
  // Replaces the fields of the top tag that `tag` sets, until it is popped.
  void change(Tag tag) noexcept { top_ = merge(top_, tag); }
  [[nodiscard]] std::size_t depth() const noexcept { return depth_; }
  // Pops down to `depth`, including tags that an exception left behind.
  void unwind(std::size_t depth) noexcept {
    if (depth >= depth_) return;
    depth_ = depth;
    if (depth < kDepth) top_ = saved_[depth];
  }
  [[nodiscard]] Tag top() const noexcept { return top_; }

  // The phase. If a backward pass has run since it was entered, forward is over, unless a module's
  // forward still runs: it may use gradients, or another thread may.
  [[nodiscard]] Phase phase() const noexcept;
  void set_phase(Phase phase) noexcept;
  void begin_forward() noexcept { ++open_forwards_; }
  // `recomputed`: it ran inside a backward pass, for activation checkpointing.
  void end_forward(bool recomputed) noexcept;
  [[nodiscard]] bool outside_forwards() const noexcept { return open_forwards_ == 0; }

  // Returns the complete tag of an allocation made now: pushed tags first, then autograd's data,
  // then the phase's default category.
  [[nodiscard]] Tag resolve(const BackwardPosition& backward) const noexcept;

  [[nodiscard]] std::uint8_t thread_id() const noexcept { return thread_id_; }

 private:
  // Deeper nesting is counted but saves no tag: the deepest tag remains until its level ends.
  static constexpr std::size_t kDepth = 256;
  std::array<Tag, kDepth> saved_{};  // [i] is the top before the push from depth i
};

namespace detail {
extern constinit thread_local ThreadTags* tags_of_this_thread
#if defined(__GLIBC__)
    __attribute__((tls_model("initial-exec")))
#endif
    ;
ThreadTags& make_tags_of_this_thread();
}  // namespace detail

inline ThreadTags& this_thread() {
  ThreadTags* tags = detail::tags_of_this_thread;
  return tags != nullptr ? *tags : detail::make_tags_of_this_thread();
}

// A call under a tag; its end also pops tags that the call left behind by raising.
class TagScope {
 public:
  explicit TagScope(Tag tag) : tags_(this_thread()), depth_(tags_.depth()) { tags_.push(tag); }
  TagScope(const TagScope&) = delete;
  TagScope& operator=(const TagScope&) = delete;
  ~TagScope() { tags_.unwind(depth_); }

 private:
  ThreadTags& tags_;
  std::size_t depth_;
};

// State of backward passes that all threads share.
class alignas(64) Backward {
 public:
  // Called on each allocation and free inside a graph task; cheap if the task is the one seen last.
  void note(int task) noexcept {
    if (last_task_.load(std::memory_order_relaxed) != task) {
      last_task_.store(task, std::memory_order_relaxed);
      epoch_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  [[nodiscard]] std::uint32_t epoch() const noexcept {
    return epoch_.load(std::memory_order_relaxed);
  }
  void set_second(bool on) noexcept { second_.store(on, std::memory_order_relaxed); }
  [[nodiscard]] Phase phase() const noexcept {
    return second_.load(std::memory_order_relaxed) ? Phase::second_backward : Phase::backward;
  }

 private:
  std::atomic<int> last_task_{-1};
  std::atomic<std::uint32_t> epoch_{0};
  std::atomic<bool> second_{false};  // ghost clipping's second pass is running
};

inline Backward backward_state;

inline Phase ThreadTags::phase() const noexcept {
  const bool over = phase_epoch_ != backward_state.epoch() && open_forwards_ == 0;
  return phase_ == Phase::forward && over ? Phase::idle : phase_;
}

inline void ThreadTags::end_forward(bool recomputed) noexcept {
  --open_forwards_;
  if (!recomputed) phase_epoch_ = backward_state.epoch();  // the loss is still to come
}

inline Tag ThreadTags::resolve(const BackwardPosition& backward) const noexcept {
  Tag tag = top_;
  const bool in_backward = backward.task >= 0;
  if (tag.phase == kKeep8) {
    tag.phase = static_cast<std::uint8_t>(in_backward ? backward_state.phase() : phase());
  }
  if (tag.module == kKeep16) tag.module = backward.module;
  if (tag.op == kKeep16) tag.op = backward.op;
  if (tag.category == kKeep8) {
    tag.category = static_cast<std::uint8_t>(default_category(static_cast<Phase>(tag.phase)));
  }
  return tag;
}

}  // namespace opacus_memprof
