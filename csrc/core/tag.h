// SPDX-License-Identifier: Apache-2.0
// The purpose of an allocation. Small and fixed-width, because it is copied on every allocation.
#pragma once

#include <cstdint>

#include "core/vocabulary.h"

namespace opacus_memprof {

// In a tag that is being pushed: inherit this field from the enclosing tag. On the stack's top: no
// hook has set the field, and ThreadTags::resolve fills it in.
inline constexpr std::uint8_t kKeep8 = 0xFF;
inline constexpr std::uint16_t kKeep16 = 0xFFFF;

struct Tag {
  std::uint8_t category = kKeep8;
  std::uint8_t phase = kKeep8;
  std::uint16_t module = kKeep16;  // id in Names; 0 is "no module"
  std::uint16_t op = kKeep16;      // id in Names; 0 is "no op"

  friend bool operator==(const Tag&, const Tag&) = default;
};

// Returns `inner`, with inherited fields taken from `outer`.
constexpr Tag merge(Tag outer, Tag inner) noexcept {
  if (inner.category == kKeep8) inner.category = outer.category;
  if (inner.phase == kKeep8) inner.phase = outer.phase;
  if (inner.module == kKeep16) inner.module = outer.module;
  if (inner.op == kKeep16) inner.op = outer.op;
  return inner;
}

// Returns the category of a block that no hook claimed, derived from its phase. The analysis
// settles cases that only the block's death shows.
constexpr Category default_category(Phase phase) noexcept {
  switch (phase) {
    case Phase::forward:
      return Category::forward_undecided;
    case Phase::backward:
    case Phase::second_backward:
      return Category::backward_temporaries;
    case Phase::clip:
      return Category::clipping_temporaries;
    case Phase::noise:
      return Category::noise;
    case Phase::optimizer_step:
      return Category::optimizer_temporaries;
    case Phase::idle:
    case Phase::setup:
    case Phase::zero_grad:
      break;
  }
  return Category::unattributed;
}

}  // namespace opacus_memprof
