# SPDX-License-Identifier: Apache-2.0
"""Faults in steps whose batch comes in parts or whose noise or bound has a past, and of numbers that are rounded."""

from tests.planted_faults.fault import Fault, integration, unit

_NET = "clipping_net"
_REFUSALS = "flash_clip_refusals"

FAULTS = [
    Fault(
        "noise_of_the_latest_step_alone",
        "optimizers/optimizer.py",
        "        self._noised_from |= dict.fromkeys(states)\n",
        "        self._noised_from = dict.fromkeys(states)\n",
        "Noise may be that of the step before the last.",
        integration(f"{_REFUSALS}::noise_that_repeats_is_refused_before_it_is_added"),
    ),
    Fault(
        "noise_of_the_newest_steps_is_forgotten",
        "optimizers/optimizer.py",
        "next(iter(self._noised_from))",
        "next(reversed(self._noised_from))",
        "In a long training the noise of a step may be that of the one before.",
        integration(f"{_REFUSALS}::noise_that_repeats_is_refused_before_it_is_added"),
    ),
    Fault(
        "warning_of_accumulated_batches",
        "optimizers/optimizer.py",
        "(self.expected_batch_size or 0) * max(1, len(own))",
        "(self.expected_batch_size or 0)",
        "Accumulated batches are taken for one that is too large.",
        integration("flash_clip::more_samples_than_the_loader_draws_are_warned_of_once"),
    ),
    Fault(
        "warning_of_the_last_part",
        "optimizers/optimizer.py",
        "samples = self.bookkeeping.limit.samples + sum(own)",
        "samples = sum(own)",
        "Of a batch in parts only the last part is compared with what the loader draws.",
        integration("flash_clip::more_samples_than_the_loader_draws_are_warned_of_once"),
    ),
    Fault(
        "forgotten_zero_grad_changes_gradients",
        "optimizers/optimizer.py",
        "        _check_processed_flag(self.params[0].summed_grad)  # before",
        "        pass  # before",
        "A step that is refused adds a sum to the gradients that the program still has.",
        integration("clipping_refusals_leave_state::a_forgotten_zero_grad_draws_no_noise"),
    ),
    Fault(
        "places_in_the_order_of_the_model",
        "optimizers/optimizer.py",
        "for i, parameter in enumerate(params)}",
        "for i, parameter in enumerate(names)}",
        "Bounds of parameters are taken in the order of the model.",
        integration(f"{_NET}::bounds_are_in_the_order_of_the_optimizer"),
    ),
    Fault(
        "adaptive_noise_of_the_last_bound",
        "optimizers/__init__.py",
        "rest ** (-1 / 2) * self.noise_bound()",
        "rest ** (-1 / 2) * self.max_grad_norm",
        "With adaptive clipping a bound that falls within a step takes the noise of earlier parts with it.",
        integration(f"{_NET}::a_bound_that_falls_within_a_step_leaves_its_noise"),
    ),
    Fault(
        "unclipped_samples_of_the_last_part",
        "optimizers/__init__.py",
        "self.unclipped_num = self.unclipped_num + self",
        "self.unclipped_num = self",
        "Of a batch in parts only the unclipped samples of the last part move the adaptive bound.",
        integration(f"{_NET}::the_adaptive_bound_moves_once_for_all_parts"),
    ),
    Fault(
        "unclipped_samples_of_the_last_backward",
        "bookkeeping/__init__.py",
        "self._unclipped = self._unclipped + (factors",
        "self._unclipped = (factors",
        "Of accumulated batches only the unclipped samples of the last one move the adaptive bound.",
        integration(f"{_NET}::the_adaptive_bound_moves_once_for_all_parts"),
    ),
    Fault(
        "norms_that_zero_grad_drops_stay",
        "bookkeeping/__init__.py",
        "        self._norm_checks.clear()\n        self._unclipped",
        "        self._unclipped",
        "A batch with NaN that zero_grad has dropped refuses the next step.",
        integration(f"{_REFUSALS}::norms_that_are_not_finite"),
    ),
    Fault(
        "net_limits_of_the_last_part",
        "bookkeeping/backward_pass.py",
        "[a + b for a, b in zip(before",
        "[b for a, b in zip(before",
        "With per_layer the net refuses a step whose batch came in several parts.",
        integration(f"{_NET}::samples_are_counted_over_all_parts"),
    ),
    Fault(
        "net_tolerance_is_absolute",
        "bookkeeping/backward_pass.py",
        "found <= allowed * (1 + _TOLERANCE)",
        "found <= allowed + _TOLERANCE",
        "The net refuses large sums for their rounding.",
        integration(f"{_NET}::a_sum_that_is_larger_by_two_per_thousand"),
    ),
    Fault(
        "shards_share_few_generators",
        "optimizers/fsdp.py",
        'int.from_bytes(digest[:7], "big")',
        'int.from_bytes(digest[:1], "big")',
        "Of many ranks two have the same noise.",
        unit("clipping_noise::shards_have_generators_of_their_own"),
    ),
    Fault(
        "bias_of_low_precision_is_rounded",
        "layers/linear.py",
        "g.sum(tuple(range(1, g.dim() - 1)), dtype=accumulation_dtype(g.dtype))",
        "g.sum(tuple(range(1, g.dim() - 1)))",
        "The per-sample gradients of a bias are rounded to eight bits.",
        unit("clipping_norms_bound::norms_of_low_precision_are_not_of_rounded_gradients"),
    ),
]
