// SPDX-License-Identifier: Apache-2.0
// What became of each block: the part of its category that only its death can tell. replay.h has
// the rules.
#pragma once

#include <cstdint>
#include <vector>

#include "core/event.h"
#include "core/replay_table.h"
#include "core/vocabulary.h"

namespace opacus_memprof {

class Fates {
 public:
  void born() { fates_.push_back(Fate::ordinary); }

  void died(const ReplayBlock& block, const Event& free) {
    if (outlived(block, false)) {
      fates_[block.birth] = Fate::outlived;
    } else if (static_cast<Phase>(free.phase) == Phase::forward && free.step == block.step &&
               !block.captured && block.birth >= live_at_oom_) {
      fates_[block.birth] = Fate::temporary;
    }
  }

  void after(const Event& event) {
    const auto phase = static_cast<Phase>(event.phase);
    const auto kind = static_cast<EventKind>(event.kind);
    const bool step = kind == EventKind::step;
    const bool entered = kind == EventKind::phase;
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
      if (outlived(block, whole)) {
        fates_[block.birth] = Fate::outlived;
      } else if (cut_in_step != nullptr && block.step == *cut_in_step && !block.captured) {
        fates_[block.birth] = Fate::undecided;
      }
    });
  }

  // The category that the block's bytes count under while it is tagged `category`.
  [[nodiscard]] std::uint8_t settled(std::uint64_t category, std::uint64_t birth) const {
    const Fate fate = fates_[birth];
    if (static_cast<Category>(category) == Category::forward_undecided) {
      if (fate == Fate::temporary) return static_cast<std::uint8_t>(Category::forward_temporaries);
      if (fate != Fate::undecided) return static_cast<std::uint8_t>(Category::activations);
    } else if (fate == Fate::outlived) {
      return static_cast<std::uint8_t>(Category::unattributed);
    }
    return static_cast<std::uint8_t>(category);
  }

 private:
  enum class Fate : std::uint8_t { ordinary, temporary, outlived, undecided };

  [[nodiscard]] bool outlived(const ReplayBlock& block, bool by_end) const {
    if (block.retagged || block.birth < live_at_oom_) return false;
    const auto category = static_cast<Category>(block.category);
    if (category == Category::backward_temporaries) {
      return by_end || block.birth < live_after_backward_;
    }
    return category == Category::optimizer_temporaries &&
           (by_end || block.birth < live_after_optimizer_);
  }

  std::vector<Fate> fates_;  // by birth
  // The births before the latest such event: a block with a smaller number lived through it, if it
  // still lives.
  std::uint64_t live_after_backward_ = 0;
  std::uint64_t live_after_optimizer_ = 0;
  std::uint64_t live_at_oom_ = 0;
};

}  // namespace opacus_memprof
