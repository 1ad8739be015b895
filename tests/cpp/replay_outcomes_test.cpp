// SPDX-License-Identifier: Apache-2.0
// What a block turns out to have been: each case is one block's life, told by hand.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/replay.h"
#include "event_file_builder.h"

namespace opacus_memprof {
namespace {

using testing::EventFileBuilder;
using testing::EventSpec;
using enum EventKind;

constexpr std::uint64_t kAddress = 4096;

struct Life {
  std::string name;
  std::vector<EventSpec> events;
  Category born_as;          // what the first event's bytes count as
  std::uint64_t closed = 1;  // of the header
  std::uint64_t dropped = 0;
};

EventSpec born(Category category, Phase phase, std::uint32_t step = 1) {
  return {.kind = alloc,
          .address = kAddress,
          .size = 100,
          .category = category,
          .phase = phase,
          .step = step};
}

EventSpec freed(Phase phase, std::uint32_t step = 1) {
  return {.kind = free, .address = kAddress, .phase = phase, .step = step};
}

constexpr std::uint8_t kAutograd = 1;

EventSpec freed_by_autograd(Phase phase, std::uint32_t step = 1) {
  return {.kind = free, .address = kAddress, .phase = phase, .step = step, .thread = kAutograd};
}

EventSpec retagged(Category before, Category after) {
  return {.kind = retag,
          .address = kAddress,
          .category = after,
          .op = static_cast<std::uint16_t>(before)};
}

const EventSpec kUndecided = born(Category::forward_undecided, Phase::forward);
const EventSpec kBackward = born(Category::backward_temporaries, Phase::backward);
const EventSpec kOptimizer = born(Category::optimizer_temporaries, Phase::optimizer_step);
const EventSpec kOom = {.kind = oom, .size = 1, .phase = Phase::forward, .step = 1};

EventSpec enter(Phase to, std::uint8_t thread = 0) {
  return {.kind = phase, .phase = to, .step = 1, .thread = thread};
}
EventSpec next_step(std::uint32_t number) { return {.kind = step, .size = number, .step = number}; }

// Something else, so that the file does not end with the block under test.
const EventSpec kOther = {.kind = alloc, .address = 64, .size = 1, .step = 2};

const std::vector<Life> kLives = {
    {"freed_in_its_forward", {kUndecided, freed(Phase::forward)}, Category::forward_temporaries},
    {"freed_in_backward", {kUndecided, freed(Phase::backward)}, Category::activations},
    {"freed_between_steps", {kUndecided, freed(Phase::idle)}, Category::activations},
    {"freed_in_the_next_forward",
     {kUndecided, next_step(2), freed(Phase::forward, 2)},
     Category::activations},
    {"alive_at_the_end", {kUndecided}, Category::activations},
    {"captured_and_returned",
     {kUndecided, retagged(Category::forward_undecided, Category::activation_hooks_shared),
      retagged(Category::activation_hooks_shared, Category::forward_undecided),
      freed(Phase::forward)},
     Category::activations},
    {"captured_for_opacus_alone",
     {kUndecided, retagged(Category::forward_undecided, Category::activation_hooks_opacus_only),
      freed(Phase::forward)},
     Category::activations},
    {"held_by_opacus_when_the_file_began",
     {born(Category::activation_hooks_shared, Phase::forward),
      retagged(Category::activation_hooks_shared, Category::forward_undecided),
      freed(Phase::forward)},
     Category::activation_hooks_shared},
    {"unwound_by_an_oom", {kUndecided, kOom, freed(Phase::forward)}, Category::activations},
    {"born_after_an_oom", {kOom, kUndecided, freed(Phase::forward)}, Category::forward_temporaries},
    {"cut_in_its_forward", {kUndecided}, Category::forward_undecided, 1, 5},
    {"captured_and_cut",
     {kUndecided, retagged(Category::forward_undecided, Category::activation_hooks_shared),
      retagged(Category::activation_hooks_shared, Category::forward_undecided)},
     Category::activations,
     1,
     5},
    {"cut_a_step_later", {kUndecided, next_step(2), kOther}, Category::activations, 1, 5},
    {"killed_in_its_forward", {kUndecided}, Category::activations, 0},

    {"freed_in_its_backward", {kBackward, freed(Phase::backward)}, Category::backward_temporaries},
    {"freed_after_the_second_backward_began",
     {kBackward, enter(Phase::second_backward), enter(Phase::backward), freed(Phase::backward)},
     Category::backward_temporaries},
    {"outlived_its_backward",
     {kBackward, enter(Phase::clip), freed(Phase::clip)},
     Category::unattributed},
    {"outlived_its_backward_and_the_step", {kBackward, next_step(2)}, Category::unattributed},
    {"dropped_by_autograd_after_another_phase_began",
     {kBackward, enter(Phase::clip), freed_by_autograd(Phase::idle)},
     Category::backward_temporaries},
    {"dropped_by_autograd_after_the_step",
     {kBackward, enter(Phase::clip), next_step(2), freed_by_autograd(Phase::idle, 2)},
     Category::backward_temporaries},
    {"kept_until_the_next_backward",
     {kBackward, enter(Phase::clip), freed_by_autograd(Phase::backward)},
     Category::unattributed},
    {"freed_between_the_phases_of_a_thread",
     {kBackward, enter(Phase::clip, kAutograd), freed_by_autograd(Phase::idle)},
     Category::unattributed},
    {"an_optimizer_s_freed_by_another_thread",
     {kOptimizer, enter(Phase::zero_grad), freed_by_autograd(Phase::idle)},
     Category::unattributed},
    {"born_in_backward_after_another_phase",
     {enter(Phase::clip), kBackward, freed(Phase::backward)},
     Category::backward_temporaries},
    {"still_there_at_the_end", {kBackward}, Category::unattributed},
    {"killed_in_its_backward", {kBackward}, Category::backward_temporaries, 0},
    {"cut_in_its_backward", {kBackward}, Category::backward_temporaries, 1, 5},
    {"became_a_gradient",
     {kBackward, retagged(Category::backward_temporaries, Category::gradients), enter(Phase::clip),
      retagged(Category::gradients, Category::noise), freed(Phase::forward)},
     Category::gradients},
    {"became_a_gradient_after_its_backward",
     {kBackward, enter(Phase::clip), retagged(Category::backward_temporaries, Category::gradients)},
     Category::gradients},
    {"became_an_optimizer_state",
     {kOptimizer, retagged(Category::optimizer_temporaries, Category::optimizer_states)},
     Category::optimizer_states},
    {"became_a_clipped_sum",
     {born(Category::clipping_temporaries, Phase::clip),
      retagged(Category::clipping_temporaries, Category::summed_gradients)},
     Category::summed_gradients},
    {"became_a_per_sample_gradient",
     {born(Category::temp_matrices, Phase::backward),
      retagged(Category::temp_matrices, Category::per_sample_gradients)},
     Category::per_sample_gradients},
    {"belonged_to_an_owner_that_was_found_later",
     {born(Category::unattributed, Phase::idle), next_step(2),
      retagged(Category::unattributed, Category::model_parameters)},
     Category::model_parameters},
    {"was_recomputed_and_captured_for_a_while",
     {kBackward, retagged(Category::backward_temporaries, Category::activation_hooks_shared),
      retagged(Category::activation_hooks_shared, Category::backward_temporaries),
      freed(Phase::backward)},
     Category::backward_temporaries},
    {"went_from_one_phase_s_temporaries_to_another_s",
     {kBackward, retagged(Category::backward_temporaries, Category::optimizer_temporaries),
      enter(Phase::clip)},
     Category::backward_temporaries},
    {"live_at_an_oom",
     {kBackward, kOom, enter(Phase::idle), freed(Phase::idle)},
     Category::backward_temporaries},

    {"freed_in_its_optimizer_step",
     {kOptimizer, freed(Phase::optimizer_step)},
     Category::optimizer_temporaries},
    {"outlived_its_optimizer_step",
     {kOptimizer, enter(Phase::zero_grad), freed(Phase::zero_grad)},
     Category::unattributed},
    {"no_way_out_of_the_optimizer_step",
     {kOptimizer, enter(Phase::optimizer_step), freed(Phase::optimizer_step)},
     Category::optimizer_temporaries},
    {"another_category_keeps_its_name",
     {born(Category::noise, Phase::noise), enter(Phase::idle), next_step(2)},
     Category::noise},
};

class Outcome : public ::testing::TestWithParam<Life> {};

TEST_P(Outcome, settles_the_category) {
  const Life& life = GetParam();
  EventFileBuilder file;
  file.header.closed = life.closed;
  file.header.dropped = life.dropped;
  // A snapshot right after the birth shows what the bytes count as.
  for (const EventSpec& event : life.events) {
    EventSpec spec = event;
    if (spec.kind == free) spec.category = Category::unattributed;
    file.add(spec);
    if (spec.kind == alloc && spec.address == kAddress) file.add({.kind = snapshot, .step = 1});
  }
  const ReplayResult result = replay(file.write());
  const auto& snapshot = result.devices.at(0).snapshots.at(0);
  EXPECT_EQ(snapshot.bytes, 100);
  EXPECT_EQ(snapshot.categories[static_cast<std::size_t>(life.born_as)], 100);
}

INSTANTIATE_TEST_SUITE_P(Lives, Outcome, ::testing::ValuesIn(kLives),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace opacus_memprof
