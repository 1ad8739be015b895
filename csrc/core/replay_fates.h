// SPDX-License-Identifier: Apache-2.0
// What became of each block: what of its category and its module only its later life can tell.
// replay.h has the rules.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "core/event.h"
#include "core/replay_table.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

class Fates {
 public:
  void born(const ReplayBlock& block) {
    fates_.push_back(kAsTagged);
    modules_.push_back(block.module);
  }

  void retagged(const ReplayBlock& block, std::uint8_t before) {
    const auto category = static_cast<std::uint8_t>(block.category);
    if (modules_[block.birth] == 0) modules_[block.birth] = block.module;
    if (!block.retagged && provisional(before) && !provisional(category) && !held(category)) {
      fates_[block.birth] = category;
    }
  }

  void died(const ReplayBlock& block, const Event& free) {
    if (fates_[block.birth] != kAsTagged) return;
    if (outlived(block, false)) {
      if (!dropped_by_autograd(block, free)) fates_[block.birth] = kOutlived;
    } else if (static_cast<Phase>(free.phase) == Phase::forward && free.step == block.step &&
               !block.captured && block.birth >= live_at_oom_) {
      fates_[block.birth] = kDiedInForward;
    }
  }

  void after(const Event& event) {
    const auto phase = static_cast<Phase>(event.phase);
    const auto kind = static_cast<EventKind>(event.kind);
    const bool step = kind == EventKind::step;
    const bool entered = kind == EventKind::phase;
    if (entered) enters_phases_.set(event.thread);
    if (step || (entered && phase != Phase::backward && phase != Phase::second_backward)) {
      live_after_backward_ = fates_.size();
    }
    if (step || (entered && phase != Phase::optimizer_step)) live_after_optimizer_ = fates_.size();
    if (kind == EventKind::oom) live_at_oom_ = fates_.size();
  }

  // `whole`: the file ended in good order. `cut_in_step`: the step in which a full file ends, if
  // any.
  void ended(const ReplayTable& table, bool whole, const std::uint32_t* cut_in_step) {
    table.for_each([&](const ReplayBlock& block) {
      if (fates_[block.birth] != kAsTagged) return;
      if (outlived(block, whole)) {
        fates_[block.birth] = kOutlived;
      } else if (cut_in_step != nullptr && block.step == *cut_in_step && !block.captured) {
        fates_[block.birth] = kUndecided;
      }
    });
  }

  // The category that the block's bytes count under while it is tagged `category`.
  [[nodiscard]] std::uint8_t settled(std::uint64_t category, std::uint64_t birth) const {
    const std::uint8_t fate = fates_[birth];
    if (static_cast<Category>(category) == Category::forward_undecided) {
      if (fate == kDiedInForward) return static_cast<std::uint8_t>(Category::forward_temporaries);
      if (fate != kUndecided) return static_cast<std::uint8_t>(Category::activations);
    } else if (provisional(category)) {
      if (fate == kOutlived) return static_cast<std::uint8_t>(Category::unattributed);
      if (fate < kMaxCategories) return fate;
    }
    return static_cast<std::uint8_t>(category);
  }

  // The module that the block counts under.
  [[nodiscard]] std::uint16_t module(const ReplayBlock& block) const {
    return block.module != 0 ? block.module : modules_[block.birth];
  }

 private:
  // A fate is the category that a block born as a temporary was first retagged to, or one of these.
  static constexpr std::uint8_t kAsTagged = 0xFF;
  static constexpr std::uint8_t kDiedInForward = 0xFE;
  static constexpr std::uint8_t kOutlived = 0xFD;
  static constexpr std::uint8_t kUndecided = 0xFC;

  // What a block is called until it is known to be a result.
  [[nodiscard]] static bool provisional(std::uint64_t category) {
    switch (static_cast<Category>(category)) {
      case Category::backward_temporaries:
      case Category::optimizer_temporaries:
      case Category::temp_matrices:
      case Category::clipping_temporaries:
        return true;
      default:
        return false;
    }
  }

  // For a time only: by a capture, or as what forward made.
  [[nodiscard]] static bool held(std::uint64_t category) {
    switch (static_cast<Category>(category)) {
      case Category::activation_hooks_shared:
      case Category::activation_hooks_opacus_only:
      case Category::forward_undecided:
        return true;
      default:
        return false;
    }
  }

  [[nodiscard]] bool outlived(const ReplayBlock& block, bool by_end) const {
    if (block.retagged || block.birth < live_at_oom_) return false;
    const auto category = static_cast<Category>(block.category);
    if (category == Category::backward_temporaries) {
      return by_end || block.birth < live_after_backward_;
    }
    return category == Category::optimizer_temporaries &&
           (by_end || block.birth < live_after_optimizer_);
  }

  // A thread of autograd's engine holds on to a backward's results for a moment after the thread
  // that waits for them goes on (GraphTask::mark_as_completed_and_run_post_processing, in torch's
  // graph_task.h). With create_graph their graph goes with them: on a busy host in another phase.
  [[nodiscard]] bool dropped_by_autograd(const ReplayBlock& block, const Event& death) const {
    return static_cast<Category>(block.category) == Category::backward_temporaries &&
           static_cast<EventKind>(death.kind) == EventKind::free &&
           static_cast<Phase>(death.phase) == Phase::idle && !enters_phases_[death.thread];
  }

  std::vector<std::uint8_t> fates_;     // by birth
  std::vector<std::uint16_t> modules_;  // by birth; the first that is one
  // The births before the latest such event: a block with a smaller number lived through it, if it
  // still lives.
  std::uint64_t live_after_backward_ = 0;
  std::uint64_t live_after_optimizer_ = 0;
  std::uint64_t live_at_oom_ = 0;
  std::bitset<256> enters_phases_;  // by thread
};

}  // namespace opacus_memprof
