// SPDX-License-Identifier: Apache-2.0
// What became of each block: what of its category and its module only its later life can tell.
// replay.h has the rules.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/births.h"
#include "core/event.h"
#include "core/replay_table.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

// A block's fate is the category that it was first retagged to, if it was born as a temporary, or
// one of these.
inline constexpr std::uint8_t kFateAsTagged = 0xFF;  // or not known yet
inline constexpr std::uint8_t kFateDiedInForward = 0xFE;
inline constexpr std::uint8_t kFateOutlived = 0xFD;
inline constexpr std::uint8_t kFateUndecided = 0xFC;  // in no file

// Tells the fates of live blocks, as events come.
class FateRules {
 public:
  // Before `block.retagged` is set.
  static void retagged(ReplayBlock& block, std::uint8_t before) {
    const auto category = static_cast<std::uint8_t>(block.category);
    if (!block.retagged && provisional(before) && !provisional(category) &&
        !is_temporary(category)) {
      block.fate = category;
    }
  }

  void died(ReplayBlock& block, const Event& free) const {
    // Of a death in a gap nothing is known but what a settled record says.
    if (block.fate != kFateAsTagged || static_cast<EventKind>(free.kind) == EventKind::none) return;
    if (outlived(block, false)) {
      if (!dropped_by_autograd(block, free)) block.fate = kFateOutlived;
    } else if (static_cast<Phase>(free.phase) == Phase::forward && free.step == block.step &&
               !block.captured && block.birth >= live_at_oom_) {
      block.fate = kFateDiedInForward;
    }
  }

  // `births`: how many blocks have been born.
  void after(const Event& event, std::uint64_t births) {
    const auto phase = static_cast<Phase>(event.phase);
    const auto kind = static_cast<EventKind>(event.kind);
    const bool step = kind == EventKind::step;
    const bool entered = kind == EventKind::phase;
    if (entered) enters_phases_[event.thread / 64] |= std::uint64_t{1} << event.thread % 64U;
    if (step || (entered && phase != Phase::backward && phase != Phase::second_backward)) {
      live_after_backward_ = births;
    }
    if (step || (entered && phase != Phase::optimizer_step)) live_after_optimizer_ = births;
    if (kind == EventKind::oom) live_at_oom_ = births;
  }

  // `whole`: the run ended in good order. `cut_in_step`: the step in which the events end too
  // early, if they do.
  void ended(ReplayBlock& block, bool whole, const std::uint32_t* cut_in_step) const {
    if (block.fate != kFateAsTagged) return;
    if (outlived(block, whole)) {
      block.fate = kFateOutlived;
    } else if (cut_in_step != nullptr && block.step == *cut_in_step && !block.captured) {
      block.fate = kFateUndecided;
    }
  }

  // What a piece needs that begins now.
  void write(Opening& opening, const Births& births) const {
    opening.after_backward = births.in_run(live_after_backward_);
    opening.after_optimizer = births.in_run(live_after_optimizer_);
    opening.at_oom = births.in_run(live_at_oom_);
    opening.enters_phases = enters_phases_;
  }
  // Goes on after a gap. An opening has numbers of the run.
  void read(const Opening& opening, const Births& births) {
    live_after_backward_ = births.before(opening.after_backward);
    live_after_optimizer_ = births.before(opening.after_optimizer);
    live_at_oom_ = births.before(opening.at_oom);
    enters_phases_ = opening.enters_phases;
  }

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

 private:
  // For a time only: by a capture, or as what forward made.
  [[nodiscard]] static bool is_temporary(std::uint64_t category) {
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
    const bool enters_phases = enters_phases_[death.thread / 64] >> death.thread % 64U & 1U;
    return static_cast<Category>(block.category) == Category::backward_temporaries &&
           static_cast<EventKind>(death.kind) == EventKind::free &&
           static_cast<Phase>(death.phase) == Phase::idle && !enters_phases;
  }

  // The births before the latest such event: a block with a smaller number lived through it, if it
  // still lives.
  std::uint64_t live_after_backward_ = 0;
  std::uint64_t live_after_optimizer_ = 0;
  std::uint64_t live_at_oom_ = 0;
  std::array<std::uint64_t, 4> enters_phases_{};  // a bit a thread
};

// The fates of all blocks of a file, by birth. A file that is overwritten between the two passes
// may have births in the second that the first did not see: they count as tagged.
class Fates {
 public:
  void born(const ReplayBlock& block) {
    fates_.push_back(block.fate);
    modules_.push_back(block.module);
  }
  void retagged(ReplayBlock& block, std::uint8_t before) {
    if (modules_[block.birth] == 0) modules_[block.birth] = block.module;
    FateRules::retagged(block, before);
    note_fate(block);
  }
  void died(ReplayBlock& block, const Event& free) {
    rules_.died(block, free);
    note_fate(block);
  }
  void note_fate(const ReplayBlock& block, std::uint16_t module) {
    if (modules_[block.birth] == 0) modules_[block.birth] = module;
    note_fate(block);
  }
  void note_fate(const ReplayBlock& block) {
    fates_[block.birth] = static_cast<std::uint8_t>(block.fate);
  }
  void after(const Event& event) { rules_.after(event, fates_.size()); }
  void resumed(const Opening& opening, const Births& births) { rules_.read(opening, births); }
  void ended(const ReplayTable& table, bool whole, const std::uint32_t* cut_in_step) {
    table.for_each([&](ReplayBlock block) {
      rules_.ended(block, whole, cut_in_step);
      note_fate(block);
    });
  }

  // The category that the block's bytes count under while it is tagged `category`.
  [[nodiscard]] std::uint8_t settled(std::uint64_t category, std::uint64_t birth) const {
    const std::uint8_t fate = birth < fates_.size() ? fates_[birth] : kFateAsTagged;
    if (static_cast<Category>(category) == Category::forward_undecided) {
      if (fate == kFateDiedInForward) {
        return static_cast<std::uint8_t>(Category::forward_temporaries);
      }
      if (fate != kFateUndecided) return static_cast<std::uint8_t>(Category::activations);
    } else if (FateRules::provisional(category)) {
      if (fate == kFateOutlived) return static_cast<std::uint8_t>(Category::unattributed);
      if (fate < kMaxCategories) return fate;
    }
    return static_cast<std::uint8_t>(category);
  }

  // The module that the block counts under.
  [[nodiscard]] std::uint16_t module(const ReplayBlock& block) const {
    return block.module != 0 || block.birth >= modules_.size() ? block.module
                                                               : modules_[block.birth];
  }

 private:
  FateRules rules_;
  std::vector<std::uint8_t> fates_;     // by birth
  std::vector<std::uint16_t> modules_;  // by birth; the first that is one
};

}  // namespace opacus_memprof
