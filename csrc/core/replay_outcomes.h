// SPDX-License-Identifier: Apache-2.0
// The outcome of each block: the part of its category and module that only its later life shows.
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

// A block's outcome is the category to which it was first retagged, if it was born as a temporary,
// or one of these.
inline constexpr std::uint8_t kOutcomeAsTagged = 0xFF;  // or not known yet
inline constexpr std::uint8_t kOutcomeDiedInForward = 0xFE;
inline constexpr std::uint8_t kOutcomeOutlived = 0xFD;
inline constexpr std::uint8_t kOutcomeUndecided = 0xFC;  // in no file

// Determines the outcomes of live blocks, as events come.
class OutcomeRules {
 public:
  // Before `block.retagged` is set.
  static void retagged(ReplayBlock& block, std::uint8_t before) {
    const auto category = static_cast<std::uint8_t>(block.category);
    if (!block.retagged && provisional(before) && !provisional(category) &&
        !is_temporary(category)) {
      block.outcome = category;
    }
  }

  void died(ReplayBlock& block, const Event& free) const {
    // For a death in a gap only a settled record gives information.
    if (block.outcome != kOutcomeAsTagged || static_cast<EventKind>(free.kind) == EventKind::none)
      return;
    if (outlived(block, false)) {
      if (!dropped_by_autograd(block, free)) block.outcome = kOutcomeOutlived;
    } else if (static_cast<Phase>(free.phase) == Phase::forward && free.step == block.step &&
               !block.captured && block.birth >= live_at_oom_) {
      block.outcome = kOutcomeDiedInForward;
    }
  }

  // `births`: number of blocks that have been born.
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

  // `whole`: the run ended properly. `cut_in_step`: the step in which the events end too early, if
  // they do.
  void ended(ReplayBlock& block, bool whole, const std::uint32_t* cut_in_step) const {
    if (block.outcome != kOutcomeAsTagged) return;
    if (outlived(block, whole)) {
      block.outcome = kOutcomeOutlived;
    } else if (cut_in_step != nullptr && block.step == *cut_in_step && !block.captured) {
      block.outcome = kOutcomeUndecided;
    }
  }

  // Writes the data for a piece that begins now.
  void write(Opening& opening, const Births& births) const {
    opening.after_backward = births.in_run(live_after_backward_);
    opening.after_optimizer = births.in_run(live_after_optimizer_);
    opening.at_oom = births.in_run(live_at_oom_);
    opening.enters_phases = enters_phases_;
  }
  // Continues after a gap. An opening has numbers of the run.
  void read(const Opening& opening, const Births& births) {
    live_after_backward_ = births.before(opening.after_backward);
    live_after_optimizer_ = births.before(opening.after_optimizer);
    live_at_oom_ = births.before(opening.at_oom);
    enters_phases_ = opening.enters_phases;
  }

  // Returns whether the category is provisional, until the block is known to be a result, or until
  // its owner is known.
  [[nodiscard]] static bool provisional(std::uint64_t category) {
    switch (static_cast<Category>(category)) {
      case Category::backward_temporaries:
      case Category::optimizer_temporaries:
      case Category::temp_matrices:
      case Category::clipping_temporaries:
      case Category::unattributed:
        return true;
      default:
        return false;
    }
  }

 private:
  // Returns whether the category is temporary: set by a capture, or undecided in forward.
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

  // A thread of autograd's engine holds a backward's results for a moment after the thread that
  // waits for them continues (GraphTask::mark_as_completed_and_run_post_processing, in torch's
  // graph_task.h). With create_graph it frees their graph, too: on a busy host in another phase.
  [[nodiscard]] bool dropped_by_autograd(const ReplayBlock& block, const Event& death) const {
    const bool enters_phases = enters_phases_[death.thread / 64] >> death.thread % 64U & 1U;
    return static_cast<Category>(block.category) == Category::backward_temporaries &&
           static_cast<EventKind>(death.kind) == EventKind::free &&
           static_cast<Phase>(death.phase) == Phase::idle && !enters_phases;
  }

  // The number of births before the latest such event: a block with a smaller number lived through
  // it, if it is still live.
  std::uint64_t live_after_backward_ = 0;
  std::uint64_t live_after_optimizer_ = 0;
  std::uint64_t live_at_oom_ = 0;
  std::array<std::uint64_t, 4> enters_phases_{};  // one bit per thread
};

// The outcomes of all blocks of a file, by birth. If a file is overwritten between the two passes,
// the second pass may have births that the first did not see: they count as tagged.
class Outcomes {
 public:
  void born(const ReplayBlock& block) {
    outcomes_.push_back(block.outcome);
    modules_.push_back(block.module);
  }
  void retagged(ReplayBlock& block, std::uint8_t before) {
    if (modules_[block.birth] == 0) modules_[block.birth] = block.module;
    OutcomeRules::retagged(block, before);
    note_outcome(block);
  }
  void died(ReplayBlock& block, const Event& free) {
    rules_.died(block, free);
    note_outcome(block);
  }
  void note_outcome(const ReplayBlock& block, std::uint16_t module) {
    if (modules_[block.birth] == 0) modules_[block.birth] = module;
    note_outcome(block);
  }
  void note_outcome(const ReplayBlock& block) {
    outcomes_[block.birth] = static_cast<std::uint8_t>(block.outcome);
  }
  void after(const Event& event) { rules_.after(event, outcomes_.size()); }
  void resumed(const Opening& opening, const Births& births) { rules_.read(opening, births); }
  void ended(const ReplayTable& table, bool whole, const std::uint32_t* cut_in_step) {
    table.for_each([&](ReplayBlock block) {
      rules_.ended(block, whole, cut_in_step);
      note_outcome(block);
    });
  }

  // Returns the category under which the block's bytes count while its tag is `category`.
  [[nodiscard]] std::uint8_t settled(std::uint64_t category, std::uint64_t birth) const {
    const std::uint8_t outcome = birth < outcomes_.size() ? outcomes_[birth] : kOutcomeAsTagged;
    if (static_cast<Category>(category) == Category::forward_undecided) {
      if (outcome == kOutcomeDiedInForward) {
        return static_cast<std::uint8_t>(Category::forward_temporaries);
      }
      if (outcome != kOutcomeUndecided) return static_cast<std::uint8_t>(Category::activations);
    } else if (OutcomeRules::provisional(category)) {
      if (outcome == kOutcomeOutlived) return static_cast<std::uint8_t>(Category::unattributed);
      if (outcome < kMaxCategories) return outcome;
    }
    return static_cast<std::uint8_t>(category);
  }

  // Returns the module under which the block counts.
  [[nodiscard]] std::uint16_t module(const ReplayBlock& block) const {
    return block.module != 0 || block.birth >= modules_.size() ? block.module
                                                               : modules_[block.birth];
  }

 private:
  OutcomeRules rules_;
  std::vector<std::uint8_t> outcomes_;  // by birth
  std::vector<std::uint16_t> modules_;  // by birth; the first module of each
};

}  // namespace opacus_memprof
