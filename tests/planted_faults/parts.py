# SPDX-License-Identifier: Apache-2.0
"""Faults in steps whose batch comes in parts or whose noise or bound has a past, and of arguments."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/kernels/sums.py": [
        (
            "Noise may be that of the step before the last.",
            "        self._states |= dict.fromkeys(states)\n",
            "        self._states = dict.fromkeys(states)\n",
            "integration/flash_clip_refusals::noise_that_repeats_is_refused_before_it_is_added",
        ),
        (
            "In a long training the noise of a step may be that of the one before.",
            "next(iter(self._states))",
            "next(reversed(self._states))",
            "integration/flash_clip_refusals::noise_that_repeats_is_refused_before_it_is_added",
        ),
    ],
    "clipping/optimizers/optimizer.py": [
        (
            "Accumulated batches are taken for one that is too large.",
            "self.expected_batch_size * max(1, len(own)) if",
            "self.expected_batch_size if",
            "integration/flash_clip::more_samples_than_the_loader_draws_are_warned_of_once",
        ),
        (
            "Of a batch in parts only the last part is compared with what the loader draws.",
            "unexpected_size(self.bookkeeping.limit.samples + sum(own),",
            "unexpected_size(sum(own),",
            "integration/flash_clip::more_samples_than_the_loader_draws_are_warned_of_once",
        ),
        (
            "A step that is refused adds a sum to the gradients that the program still has.",
            "        for parameter in self.params[:1]:  # before",
            "        for parameter in []:  # before",
            "integration/clipping_refusals_leave_state::a_forgotten_zero_grad_draws_no_noise",
        ),
        (
            "Samples of a loop over parts that ended early count twice in the next step.",
            "            self._give_up_unfinished()\n",
            "            pass\n",
            "integration/clipping_net::an_unfinished_logical_batch_is_dropped_when_the_loop_ends",
        ),
        (
            "The sums of a loop over parts that ended early enter the next step.",
            "            self.bookkeeping.clear()\n        self._forget_sums()\n",
            "            self.bookkeeping.clear()\n",
            "integration/clipping_net::an_unfinished_logical_batch_is_dropped_when_the_loop_ends",
        ),
        (
            "A backward whose step a loop over parts has left out enters the next step.",
            "        if not keeps_backward:\n            self.bookkeeping.clear()\n",
            "",
            "integration/clipping_net::an_unfinished_logical_batch_is_dropped_when_the_loop_ends",
        ),
        (
            "A sum has parts of two logical batches where a loop has gone past a part without its step.",
            "left_part = self._parts.begin_step(self._module.layer_hooks.forward)\n",
            "left_part = None\n",
            "integration/clipping_net::a_part_with_a_swallowed_error_joins_no_other_batch",
        ),
        (
            "Bounds of parameters are taken in the order of the model.",
            "for i, parameter in enumerate(params)}",
            "for i, parameter in enumerate(names)}",
            "integration/clipping_net::bounds_are_in_the_order_of_the_optimizer",
        ),
    ],
    "clipping/sampling.py": [
        (
            "The parts of a loop that was left enter the next loop's first step.",
            "        return not self._skips or (drawn is not None and drawn.iterations != self._drawn_iterations)",
            "        return False",
            "integration/clipping_net::a_batch_that_its_loop_has_left_joins_no_other",
        ),
        (
            "Parts that a loop reads ahead are refused.",
            "sum(each < forward for each in self._left_forwards)",
            "sum(each <= forward for each in self._left_forwards)",
            "integration/clipping_net::parts_that_are_read_ahead_are_not_refused",
        ),
    ],
    "clipping/optimizers/__init__.py": [
        (
            "With adaptive clipping a bound that falls within a step takes the noise of earlier parts with it.",
            "rest ** (-1 / 2) * self.noise_bound()",
            "rest ** (-1 / 2) * self.max_grad_norm",
            "integration/clipping_net::a_bound_that_falls_within_a_step_leaves_its_noise",
        ),
        (
            "Of a batch in parts only the unclipped samples of the last part move the adaptive bound.",
            "self.unclipped_num = self.unclipped_num + self",
            "self.unclipped_num = self",
            "integration/clipping_net::the_adaptive_bound_moves_once_for_all_parts",
        ),
    ],
    "clipping/bookkeeping/__init__.py": [
        (
            "Of accumulated batches only the unclipped samples of the last one move the adaptive bound.",
            "self._unclipped = self._unclipped + (factors",
            "self._unclipped = (factors",
            "integration/clipping_net::the_adaptive_bound_moves_once_for_all_parts",
        ),
        (
            "A batch with NaN that zero_grad has dropped refuses the next step.",
            "        self._norm_checks.clear()\n        self._unclipped",
            "        self._unclipped",
            "integration/flash_clip_refusals::norms_that_are_not_finite",
        ),
        (
            "After a penalty on a parameter no step is taken any more.",
            "        self.beside_layers.clear()\n",
            "",
            "integration/flash_clip_refusals::a_penalty_on_a_weight_is_refused_and_training_continues",
        ),
    ],
    "clipping/bookkeeping/backward_pass.py": [
        (
            "With per_layer the net refuses a step whose batch came in several parts.",
            "[a + b for a, b in zip(before",
            "[b for a, b in zip(before",
            "integration/clipping_net::samples_are_counted_over_all_parts",
        ),
        (
            "The net refuses large sums for their rounding.",
            "found <= allowed * (1 + _TOLERANCE)",
            "found <= allowed + _TOLERANCE",
            "integration/clipping_net::a_sum_that_is_larger_by_two_per_thousand",
        ),
    ],
    "clipping/optimizers/fsdp.py": [
        (
            "Of many ranks two have the same noise.",
            'int.from_bytes(digest[:7], "big")',
            'int.from_bytes(digest[:1], "big")',
            "unit/clipping_noise::shards_have_generators_of_their_own",
        ),
    ],
    "clipping/verification.py": [
        (
            "verify calls noise wrong that is four standard deviations off.",
            "(square ** (1 / 3) - 1 + spread**2) / spread",
            "(square ** (1 / 2) - 1 + spread**2) / spread",
            "integration/clipping_verification::noise_is_wrong_beyond_six_standard_deviations",
        ),
        (
            "verify calls noise right that lowers all numbers.",
            "if not abs(float(joined.mean())) * math.sqrt(count)",
            "if not float(joined.mean()) * math.sqrt(count)",
            "integration/clipping_verification::noise_is_wrong_beyond_six_standard_deviations",
        ),
    ],
    "clipping/arguments.py": [
        (
            "noise_multiplier=True is noise of one.",
            "isinstance(value, (bool, str, bytes))",
            "isinstance(value, (str, bytes))",
            "unit/engine_arguments",
        ),
        (
            "clipping per layer takes an empty list of bounds.",
            "not value or not all(map(is_bound, value))",
            "not all(map(is_bound, value))",
            "unit/engine_arguments",
        ),
    ],
}
