# SPDX-License-Identifier: Apache-2.0
"""Faults in clip factors, in the bookkeeping of backward passes, and in the net under every step."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/arguments.py": [
        ("Factors are smaller than Opacus'.", "\n_STABILITY = 1e-6", "\n_STABILITY = 1e-3", "kind_linear"),
        (
            "Small gradients are enlarged to the bound.",
            "(self.bound / (norms + _STABILITY)).clamp(max=1.0)",
            "self.bound / (norms + _STABILITY)",
            "kind_linear",
        ),
        (
            "Small gradients of a parameter are enlarged to its bound.",
            "(self.bounds[index] / (norms + _STABILITY)).clamp(max=1.0)",
            "self.bounds[index] / (norms + _STABILITY)",
            "batches_per_layer",
        ),
        (
            "Each parameter is clipped to the bound of all.",
            "self.bounds[index] / (norms",
            "self.bound / (norms",
            "batches_per_layer",
        ),
        (
            "Automatic clipping has the constant of flat clipping.",
            "_AUTOMATIC_STABILITY = 0.01",
            "_AUTOMATIC_STABILITY = 1e-6",
            "integration/flash_clip_rules::automatic_clipping_normalizes",
        ),
        (
            "Automatic clipping does not enlarge small gradients.",
            "return self.bound / (norms + _AUTOMATIC_STABILITY)",
            "return (self.bound / (norms + _AUTOMATIC_STABILITY)).clamp(max=1.0)",
            "batches_automatic",
        ),
        (
            "A scheduler lowers the noise while parameters stay clipped to the old bounds.",
            "bounds.copy() if self.bound == given else [each * (self.bound / given) for each in bounds]",
            "bounds.copy()",
            "integration/clipping_net::bounds_of_parameters_keep_their_ratios",
        ),
        (
            "Bounds of parameters move by another ratio than the noise.",
            "each * (self.bound / given)",
            "each * (self.bound / given) ** 2",
            "integration/clipping_net::bounds_of_parameters_keep_their_ratios",
        ),
        (
            "With per_layer the noise is in proportion to the largest bound instead of the root of their squares.",
            "math.hypot(*self.bounds)",
            "max(self.bounds)",
            (
                "integration/clipping_net::noise_and_bound_follow_schedulers",
                "integration/clipping_net::bounds_of_parameters_keep_their_ratios",
            ),
        ),
    ],
    "clipping/bookkeeping/__init__.py": [
        (
            "Bounds are taken in the order of backward instead of the optimizer's.",
            "self.rule.factors_of(self.places[p], norms[i])",
            "self.rule.factors_of(i, norms[i])",
            "integration/flash_clip_rules::per_layer_clipping_equals_hooks",
        ),
        (
            "With a mean loss norms are too small by the batch size.",
            "by_parameter.sum(0).sqrt_().mul_(scale)",
            "by_parameter.sum(0).sqrt_()",
            "kind_linear_3d_mean",
        ),
        (
            "With a mean loss the sum is too small by the batch size.",
            "return factors.mul_(scale)",
            "return factors",
            "kind_linear_3d_mean",
        ),
        (
            "A sum loss is scaled as a mean loss.",
            'each.batch_size if self.loss_reduction == "mean" else 1',
            "each.batch_size",
            "kind_linear",
        ),
        (
            "With per_layer and a mean loss norms are too small by the batch size.",
            "norms = by_parameter.sqrt().mul_(scale)",
            "norms = by_parameter.sqrt()",
            "integration/flash_clip_rules::per_layer_clipping_equals_hooks",
        ),
        (
            "The second of two passes drops all uses of a shared parameter but the last.",
            "current.sums[parameter] + total if parameter in current.sums else total",
            "total",
            "kind_tied_two_passes",
        ),
        (
            "Of a layer that turns out to run twice only the last run counts.",
            "        elif layer in current.kept:\n            self._share(current, layer, x, g)\n",
            "",
            "modes_repeats_later_unchecked_1",
        ),
        (
            "In two passes the norm of the first use of a layer that turns out to run twice is lost.",
            "self._found_shared = True",
            "self._found_shared = False",
            "modes_repeats_later_unchecked_2",
        ),
        (
            "The samples with a finite norm are dropped instead of the others.",
            "each.samples = finite.nonzero()",
            "each.samples = (~finite).nonzero()",
            "integration/clipping_refusals_leave_state::dropped_samples_add_nothing",
        ),
        (
            "Indices of dropped samples are counted from the beginning of each physical batch.",
            "self.limit.samples + i for i in each.dropped",
            "i for i in each.dropped",
            "integration/clipping_refusals_leave_state::inputs_that_are_not_finite_are_dropped",
        ),
        (
            "The samples dropped in earlier steps are listed as those of this one.",
            "            self.dropped = []",
            "            pass",
            "integration/clipping_refusals_leave_state::inputs_that_are_not_finite_are_dropped",
        ),
        (
            "A step with NaN in its norms is taken.",
            "            check.raise_unless_finite()",
            "            pass",
            "integration/flash_clip_refusals::norms_that_are_not_finite",
        ),
        (
            "A parameter that backward does not reach keeps its summed gradient of None.",
            "            if missing:",
            "            if False and missing:",
            "integration/flash_clip_refusals::layers_that_no_gradient_reaches",
        ),
        (
            "A penalty on a parameter is left out without a word.",
            "        if self.beside_layers:",
            "        if False:",
            "outputs_weight_penalty",
        ),
        (
            "Layers that saw another number of samples get clip factors of others.",
            "if size != current.batch_size:",
            "if False:",
            "integration/flash_clip_refusals::several_forwards_of_other_samples_for_one_backward",
        ),
        (
            "Poisson batches are added up, and the accountant hears of one.",
            "if self._passes and not self.accumulation_allowed:",
            "if False:",
            "integration/flash_clip_refusals::poisson_batches_do_not_accumulate",
        ),
        (
            "The mean over accumulated batches is divided by the size of one.",
            "self.passes_in_last_step = len(passes)",
            "self.passes_in_last_step = 1",
            "integration/flash_clip::accumulated_backwards",
        ),
        (
            "The samples of accumulated batches are clipped as if they were one.",
            "            if each.tasks & tasks:",
            "            if each.tasks:",
            "batches_accumulated",
        ),
        (
            "Adaptive clipping counts no sample as unclipped.",
            "(factors >= 1).sum()",
            "(factors > 1).sum()",
            "integration/flash_clip_rules::adaptive_clipping_equals_hooks",
        ),
        (
            "Adaptive clipping divides by the number of batches instead of samples.",
            "sum(each.batch_size for each in passes)",
            "len(passes)",
            "integration/flash_clip_rules::adaptive_clipping_equals_hooks",
        ),
        (
            "The net allows the sum of all steps so far, and the noise has the largest bound of all of them.",
            'not needed any more."""\n        self.limit = Limit()',
            'not needed any more."""',
            (
                "integration/clipping_net::noise_and_bound_follow_schedulers",
                "integration/clipping_net::samples_that_zero_grad_drops_do_not_count",
            ),
        ),
    ],
    "clipping/bookkeeping/backward_pass.py": [
        (
            "Samples whose norm is not finite stay in the sum.",
            "        factors = self.select(factors)\n",
            "",
            "integration/clipping_refusals_leave_state::dropped_samples_add_nothing",
        ),
        (
            "Dropped samples stay in the sums of parameters that are used several times.",
            "            shared.select(samples)",
            "            pass",
            "integration/clipping_refusals_leave_state::dropped_samples_add_nothing",
        ),
        (
            "The samples behind a dropped one get the factors of the samples before them.",
            "return factors[samples]",
            "return factors[: len(samples)]",
            "integration/clipping_refusals_leave_state::dropped_samples_add_nothing",
        ),
        (
            "The net lets a sum pass that is a thousand times too large.",
            "_TOLERANCE = 1e-3",
            "_TOLERANCE = 1e3",
            "integration/clipping_net::a_sum_that_is_larger_by_two_per_thousand",
        ),
        (
            "The net allows one bound more than there are samples.",
            "return Limit(samples, samples * rule.bound,",
            "return Limit(samples, (samples + 1) * rule.bound,",
            "integration/clipping_net::a_sum_that_is_larger_by_two_per_thousand",
        ),
        (
            "The net compares the largest parameter's norm with the limit of all.",
            "if most else [(total, limit.total)]",
            "if most else [(max(norms), limit.total)]",
            "integration/clipping_net::a_sum_that_is_larger_by_two_per_thousand",
        ),
        (
            "With per_layer the net allows each parameter the bound of all.",
            "[samples * bound for bound in rule.bounds]",
            "[samples * rule.bound for _ in rule.bounds]",
            "integration/clipping_net::a_sum_that_is_larger_by_two_per_thousand",
        ),
        (
            "The net refuses a step whose batch came in several parts.",
            "self.total += other.total",
            "self.total = other.total",
            "integration/clipping_net::samples_are_counted_over_all_parts",
        ),
        (
            "A sum that has overflowed is taken.",
            "            if not math.isfinite(norm):",
            "            if False:",
            "integration/clipping_net::a_sum_that_is_not_finite",
        ),
        (
            "A batch with NaN in one sample is taken.",
            "HostCopy(self.norms.sum())",
            "HostCopy(self.norms.min())",
            "integration/flash_clip_refusals::norms_that_are_not_finite",
        ),
    ],
}
