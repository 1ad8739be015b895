# SPDX-License-Identifier: Apache-2.0
"""Faults in the noise, in the optimizer's step, and in what a step leaves behind."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/optimizers/optimizer.py": [
        (
            "A step leaves out the sums of parameters that were frozen after its first physical batch.",
            "        if lost and self._is_last_step_skipped:",
            "        if False:",
            "between_frozen_within_a_step",
        ),
        (
            "The standard deviation has the noise multiplier squared.",
            "float(self.noise_multiplier * self.noise_bound())",
            "float(self.noise_multiplier**2 * self.noise_bound())",
            "integration/flash_clip::noise_is_opacus_noise",
        ),
        (
            "The noise is not in proportion to the bound.",
            "float(self.noise_multiplier * self.noise_bound())",
            "float(self.noise_multiplier)",
            "integration/flash_clip::noise_is_opacus_noise",
        ),
        (
            "A bound that falls within a step takes the noise of earlier parts with it.",
            "return self.bookkeeping.limit.bound or self.max_grad_norm",
            "return self.max_grad_norm",
            "integration/clipping_net::a_bound_that_falls_within_a_step_leaves_its_noise",
        ),
        (
            "Biases get no noise.",
            "            if self._gets_noise(parameter):\n",
            "            if self._gets_noise(parameter) and parameter.dim() > 1:\n",
            "integration/flash_clip::noise_is_opacus_noise",
        ),
        (
            "Sums of skipped steps are lost where a low-precision sum is rounded at once.",
            "if not self._is_alone or self.bookkeeping.passes != 1 or self.bookkeeping.limit.samples:",
            "if not self._is_alone:",
            "integration/clipping_precision::sums_of_skipped_steps_stay_in_float32",
        ),
        (
            "A refused step has drawn noise, and tells how often it was tried.",
            "            generators.restore()\n",
            "",
            "integration/clipping_refusals_leave_state::a_refused_step_leaves_everything",
        ),
        (
            "A refused step restores a generator that it has not drawn from.",
            "return sums.GeneratorStates([self.generator])",
            "return sums.GeneratorStates([noise.default_generator(self.params[0].device)])",
            "integration/clipping_refusals_leave_state::a_refused_step_leaves_everything",
        ),
        (
            "The sums of a refused step are part of the next one.",
            "                self.zero_grad()\n",
            "",
            (
                "integration/clipping_refusals_leave_state::a_refused_step_leaves_everything",
                "loop_flat_goes_on_after_nan",
            ),
        ),
        (
            "Where a later part of a batch is refused, the sums of earlier parts stay.",
            "                self._is_last_step_skipped = False\n                self.bookkeeping.refusal.raised = 0\n",
            "                self.bookkeeping.refusal.raised = 0\n",
            "integration/clipping_refusals_leave_state::a_refused_step_leaves_everything",
        ),
        (
            "A sum that is larger than its samples allow is taken.",
            "        self._check_sums()\n",
            "        pass\n",
            "integration/clipping_net::factors_that_are_too_large",
        ),
        (
            "A step with NaN is taken.",
            "        self._check_norms()  # last",
            "        pass  # last",
            "integration/flash_clip_refusals::norms_that_are_not_finite",
        ),
        (
            "The net does not see sums of low precision.",
            "            check.add_norms(norms)\n",
            "            check.add_norms(norms * 0)\n",
            "integration/clipping_net::factors_that_are_too_large_for_sums_that_are_rounded",
        ),
        (
            "Accumulated batches of a mean loss are added up.",
            "self.expected_batch_size * self.accumulated_iterations * self.ranks",
            "self.expected_batch_size * self.ranks",
            "integration/flash_clip::accumulated_backwards",
        ),
        (
            "A sum loss is divided by the expected batch size.",
            'is_mean = self.loss_reduction == "mean"',
            "is_mean = True",
            "integration/flash_clip::training_equals_hooks",
        ),
        (
            "Of accumulated batches only the last one counts.",
            "                parameter.summed_grad += total",
            "                parameter.summed_grad = total",
            "batches_accumulated",
        ),
        (
            "zero_grad drops the sums of the earlier parts of a batch.",
            "        if not self._is_last_step_skipped:\n            self._forget_sums()",
            "        self._forget_sums()",
            "integration/flash_clip::batch_memory_manager",
        ),
        (
            "The sums of the last step stay for the next one.",
            "            parameter.summed_grad = None\n        self.bookkeeping.begin_step()",
            "            pass\n        self.bookkeeping.begin_step()",
            "integration/flash_clip::training_equals_hooks",
        ),
        (
            "The first parts of a batch update the model without noise.",
            "            self._is_last_step_skipped = True\n            return False",
            "            self._is_last_step_skipped = True\n            return True",
            "integration/clipping_refusals_leave_state::parts_of_a_batch_are_one_step",
        ),
        (
            "The accountant hears of each part of a batch.",
            "        if skips:\n            self._is_last_step_skipped = True\n",
            "        if skips:\n            self._is_last_step_skipped = True\n"
            "            self.step_hook and self.step_hook(self)\n",
            "integration/clipping_refusals_leave_state::parts_of_a_batch_are_one_step",
        ),
        (
            "The accountant hears of no step.",
            "            self.step_hook(self)",
            "            pass",
            (
                "integration/flash_clip::with_epsilon",
                "integration/clipping_refusals_leave_state::the_accountant_does_not_hear_of_a_refused_step",
            ),
        ),
        (
            "The noisy gradient of the last step is part of the next one.",
            "        _check_processed_flag([parameter.summed_grad for parameter in params])",
            "        pass",
            "integration/flash_clip_refusals::gradients_of_all_parameters_must_be_cleared",
        ),
    ],
    "clipping/bookkeeping/backward_pass.py": [
        (
            "The noise is in proportion to the bound of the last part of a batch.",
            "self.bound = max(self.bound, other.bound)",
            "self.bound = other.bound",
            "integration/clipping_net::a_bound_that_falls_within_a_step_leaves_its_noise",
        ),
    ],
    "clipping/kernels/sums.py": [
        (
            "The noise is not drawn from the given generator.",
            "return draw_normal(references, std, generator)",
            "return draw_normal(references, std, None)",
            "unit/clipping_noise::the_numbers_are_those_of_opacus",
        ),
        (
            "The same noise is added twice.",
            "native.add_and_divide(batch, drawn, divisor)",
            "native.add_and_divide(batch, [2 * each for each in drawn], divisor)",
            "unit/clipping_noise::sums_with_noise_are_divided",
        ),
        (
            "Parameters of the same shape get the same noise.",
            "        drawn = draw_noise(batch, std, generator, secure_mode)\n",
            "        drawn = draw_noise(batch, std, generator, secure_mode)\n"
            "        drawn = [next(d for d in drawn if d.shape == each.shape) for each in drawn]\n",
            "unit/clipping_noise::sums_with_noise_are_divided",
        ),
        (
            "secure_mode draws one number instead of the sum of several.",
            "opacus_optimizer._generate_noise(std, each, generator, secure_mode) for each",
            "opacus_optimizer._generate_noise(std, each, generator, False) for each",
            "unit/clipping_noise::the_numbers_are_those_of_opacus",
        ),
        (
            "A step with a mean loss is not divided by the batch size.",
            "native.add_and_divide(batch, drawn, divisor)",
            "native.add_and_divide(batch, drawn, 1)",
            "unit/clipping_noise::sums_with_noise_are_divided",
        ),
    ],
    "clipping/workspace.py": [
        (
            "Sums of bf16 parameters are rounded before noise is added.",
            "return torch.float32 if is_low_precision(dtype) else dtype.to_real()",
            "return dtype.to_real()",
            (
                "integration/clipping_precision::noise_is_added_before_the_sum_is_rounded",
                "integration/clipping_precision::one_of_a_thousand_samples_changes_the_sum_within_bounds",
            ),
        ),
    ],
    "clipping/optimizers/__init__.py": [
        (
            "The noise of the sum leaves another room for the noise of the count than the paper.",
            "(2 * self.unclipped_num_std) ** (-2)",
            "self.unclipped_num_std ** (-2)",
            "integration/flash_clip_rules::adaptive_clipping_equals_hooks",
        ),
        (
            "The number of unclipped samples moves the bound without noise.",
            "std=self.unclipped_num_std, reference=count",
            "std=0.0, reference=count",
            "integration/flash_clip_rules::adaptive_clipping_equals_hooks",
        ),
        (
            "The adaptive bound leaves the range that was asked for.",
            "min(max(bound, self.min_clipbound), self.max_clipbound)",
            "bound",
            "integration/flash_clip_rules::adaptive_clipping_equals_hooks",
        ),
        (
            "The adaptive bound grows where too many samples are unclipped.",
            "change = -self.clipbound_learning_rate",
            "change = self.clipbound_learning_rate",
            "integration/flash_clip_rules::adaptive_clipping_equals_hooks",
        ),
        (
            "The samples of all steps so far move the adaptive bound.",
            "        self.sample_size = self.unclipped_num = 0\n",
            "        pass\n",
            "integration/clipping_net::the_sizes_of_adaptive_clipping_count_all_parts",
        ),
        (
            "The bound moves in the midst of a batch that comes in parts.",
            "        if not super().pre_step():\n            return False\n        self.update_max_grad_norm()",
            "        is_step = super().pre_step()\n        self.update_max_grad_norm()\n"
            "        if not is_step:\n            return False",
            "integration/clipping_net::the_adaptive_bound_moves_once_for_all_parts",
        ),
    ],
    "clipping/arguments.py": [
        (
            "The norm counts parameters that the optimizer does not update.",
            "    if missing:\n",
            "    if False:\n",
            "integration/flash_clip_refusals::the_optimizer_must_hold_all_trainable_parameters",
        ),
        (
            "The optimizer updates parameters that are not clipped.",
            "    if len(held) > len(names):\n",
            "    if False:\n",
            "integration/flash_clip_refusals::the_optimizer_must_hold_no_other_parameters",
        ),
        (
            "A scheduler can make the noise negative.",
            "if not (value >= 0 and math.isfinite(value)):",
            "if not math.isfinite(value):",
            "integration/clipping_net::noise_multipliers_that_are_none",
        ),
        (
            "The noise is that of the bounds before.",
            "        self._set(bounds)\n",
            "        self.bounds = [float(each) for each in bounds]\n",
            "setting_bounds",
        ),
    ],
    "clipping/graphed.py": [
        (
            "A replay trains on the example again.",
            "                own.copy_(leaf, non_blocking=True)",
            "                pass",
            "gpu/graphed_backward_cuda",
        ),
        (
            "A replay overwrites the sums of the parts before it.",
            "        self._keep_sums()\n",
            "",
            "gpu/graphed_backward_cuda",
        ),
        (
            "A replay clips to the bound of the capture.",
            "if not is_alike or self._captured_state() != self._state or",
            "if not is_alike or",
            "gpu/graphed_backward_cuda",
        ),
        (
            "The norms of a part are overwritten before they are read.",
            "NormCheck(self._check.norms.clone(),",
            "NormCheck(self._check.norms,",
            "gpu/graphed_backward_cuda",
        ),
        (
            "What a loop carries from a step into the next is not seen, because the next step is a replay.",
            "return is_proved_again or self._module.parts.is_due()",
            "return is_proved_again",
            "gpu/graphed_backward_cuda",
        ),
        (
            "The loop's first steps are not followed, because the trials before the capture count as steps.",
            "        module.forget_calls()",
            "        module.modes()",
            "gpu/graphed_backward_cuda",
        ),
    ],
    "clipping/module/between_calls.py": [
        (
            "The bound may be the median of the norms of the samples before.",
            "mode.values.depends(x) or mode.numbers.sets(x, now) for",
            "mode.numbers.sets(x, now) for",
            "setting_bound_of_the_median",
        ),
        (
            "The bound may be the mean loss of the samples before.",
            "mode.values.depends(x) or mode.numbers.sets(x, now) for",
            "mode.values.depends(x) for",
            ("setting_bound_of_losses", "setting_bound_of_a_moving_mean"),
        ),
    ],
    "clipping/bookkeeping/__init__.py": [
        ("A copy of a private model trains without gradients.", '"is_copy": True, ', "", "setting_copy_trained"),
        (
            "The optimizer that was given to make_private steps without gradients.",
            "if own is not None and own.passes:",
            "if False:",
            "setting_own_optimizer_stepped",
        ),
    ],
    "clipping/module/hooks.py": [
        (
            "The own parameters of a model have no gradients in the forward that finds its layers changed.",
            "is_new = self._attached.tap_of(module) not in (None, tap)",
            "is_new = self._attached.tap_of(module) is not None and tap is None",
            "changes_frozen_beside_a_token",
        ),
    ],
    "clipping/sampling.py": [
        (
            "Positions of a sequence count as samples, if there are about as many.",
            "        self.mismatches += 1",
            "        self.mismatches += 0",
            "loop_positions_first_of_the_batch_s_size",
        ),
    ],
}
