// SPDX-License-Identifier: Apache-2.0
// The vocabulary of every report: the purposes of memory (Category) and the activities of training
// (Phase).
//
// The numbers are part of the event file's format: append, never reorder. A program adds its own
// categories at run time (Names::category); they get the ids after kBuiltinCategories.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace opacus_memprof {

enum class Category : std::uint8_t {
  unattributed,
  model_parameters,
  buffers,
  gradients,
  optimizer_states,
  activations,                   // settled by the analysis: born in forward, alive after it
  activation_hooks_shared,       // captured by Opacus, held by autograd as well
  activation_hooks_opacus_only,  // captured by Opacus, held by nobody else
  per_sample_gradients,
  norm_samples,
  temp_matrices,
  clipping_temporaries,
  summed_gradients,
  noise,
  backprop_copies,
  forward_temporaries,  // settled by the analysis: born in forward, dead before its end
  backward_temporaries,
  optimizer_temporaries,
  communication,
  library_workspace,
  inputs,
  pending_free,  // freed by the program, kept by the allocator until a side stream has finished
  forward_undecided,  // born in forward; its death shows whether it is an activation or temporary
};

inline constexpr std::array<std::string_view, 23> kCategoryNames{
    "unattributed",
    "model_parameters",
    "buffers",
    "gradients",
    "optimizer_states",
    "activations",
    "activation_hooks_shared",
    "activation_hooks_opacus_only",
    "per_sample_gradients",
    "norm_samples",
    "temp_matrices",
    "clipping_temporaries",
    "summed_gradients",
    "noise",
    "backprop_copies",
    "forward_temporaries",
    "backward_temporaries",
    "optimizer_temporaries",
    "communication",
    "library_workspace",
    "inputs",
    "pending_free",
    "forward_undecided",
};
inline constexpr std::size_t kBuiltinCategories = kCategoryNames.size();
// Counters are arrays over all categories, built-in and the program's own.
inline constexpr std::size_t kMaxCategories = 64;

enum class Phase : std::uint8_t {
  idle,  // between steps; everything that no hook claimed
  setup,
  forward,
  backward,
  second_backward,  // ghost clipping's second pass
  clip,
  noise,
  optimizer_step,
  zero_grad,
};

inline constexpr std::array<std::string_view, 9> kPhaseNames{
    "idle", "setup", "forward",        "backward",  "second_backward",
    "clip", "noise", "optimizer_step", "zero_grad",
};
inline constexpr std::size_t kPhases = kPhaseNames.size();

}  // namespace opacus_memprof
