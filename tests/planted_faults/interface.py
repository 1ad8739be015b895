# SPDX-License-Identifier: Apache-2.0
"""Faults in make_private, register, verify and check=, and in what these refuse."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/arguments.py": [
        (
            "Norms of a summed loss are multiplied by the batch size.",
            "if of_optimizer != of_module:",
            "if False:",
            "integration/flash_clip_refusals::module_and_optimizer_have_the_same_reduction",
        ),
        (
            "An optimizer that needs a closure fails in its first step.",
            "if closure is not None and closure.default is closure.empty:",
            "if False:",
            "integration/flash_clip_refusals::optimizers_that_need_other_gradients",
        ),
        (
            'check="sometimes" ends with the powers of two.',
            "step & (step - 1) == 0 if step <= _LAST_POWER else step % _LATER == 0",
            "step & (step - 1) == 0",
            "integration/check_opacus_modes::the_schedule",
        ),
        (
            "flash_clip proves nothing unless it is asked to.",
            'return "sometimes" if mode in OWN_MODES else "off"',
            'return "off"',
            "unit/engine_arguments::flash_clip_is_checked_unless_it_is_off",
        ),
        (
            "make_private takes negative noise.",
            "if not math.isfinite(number) or number < 0:",
            "if not math.isfinite(number):",
            "unit/engine_arguments",
        ),
        (
            "make_private takes an infinite bound.",
            "return math.isfinite(number) and number > 0",
            "return number > 0",
            "unit/engine_arguments",
        ),
        (
            "make_private ignores arguments that it does not know.",
            "        _refuse_unknown(name, given, listed | engine._extra_arguments(name, given), listed)\n",
            "",
            "unit/engine_arguments",
        ),
    ],
    "clipping/verification.py": [
        (
            "verify calls a mode exact that is a hundredth off.",
            "((torch.float64, 1e-8), (torch.float32, 1e-4))",
            "((torch.float64, 1e-2), (torch.float32, 1e2))",
            "integration/clipping_verification::small_errors_of_norms_and_of_sums",
        ),
        (
            "verify compares norms alone.",
            "max([self.norm_error, *self.errors.values()]) <= self.tolerance",
            "self.norm_error <= self.tolerance",
            "integration/clipping_verification::small_errors_of_norms_and_of_sums",
        ),
        (
            "verify compares sums alone.",
            "max([self.norm_error, *self.errors.values()]) <= self.tolerance",
            "max(self.errors.values()) <= self.tolerance",
            "integration/clipping_verification::small_errors_of_norms_and_of_sums",
        ),
        (
            "verify calls a model exact that draws random numbers and mixes samples.",
            "        if hand.draws and hand.mixes():",
            "        if False:",
            "integration/clipping_verification::mixing_is_said",
        ),
        (
            "verify does not look at the noise.",
            '{wrong}." if wrong else None',
            '{wrong}." if wrong is False else None',
            "integration/clipping_verification::wrong_noise_of_flash_clip",
        ),
        (
            "verify takes two samples by default.",
            "lambda x: x[:count] if _has_samples(x, size) else x, batch",
            "lambda x: x[: count or 2] if _has_samples(x, size) else x, batch",
            "integration/clipping_verification",
        ),
        (
            "Noise of any standard deviation is right.",
            "if not abs(sigmas) <= _MOST_SIGMAS:",
            "if not abs(sigmas) <= 1e6 * _MOST_SIGMAS:",
            "integration/clipping_verification::wrong_noise_of_flash_clip",
        ),
        (
            "Parameters may have the same noise.",
            "return stds, _dependent(draws) or _wrong_size(draws, std)",
            "return stds, _wrong_size(draws, std)",
            "integration/clipping_verification::parameters_with_the_same_noise",
        ),
    ],
    "clipping/engine.py": [
        (
            "check= of Opacus' modes checks nothing.",
            '                check_steps(prepared, given, own["check"], certificate)',
            "                pass",
            "integration/check_opacus_modes::a_wrong_sum_is_refused_at_checked_steps_only",
        ),
        (
            "check= of make_private does not reach flash_clip.",
            "for name, value in (self._flash_clip_options or {}).items() if name in known}",
            'for name, value in (self._flash_clip_options or {}).items() if name in known - {"check"}}',
            "unit/engine_arguments::flash_clip_is_checked_unless_it_is_off",
        ),
        (
            "The engine does not pass the given generator of noise on.",
            "generator=self.secure_rng if secure else noise_generator,",
            "generator=self.secure_rng if secure else None,",
            "integration/flash_clip::noise_is_opacus_noise",
        ),
        (
            "secure_mode does not reach the optimizer.",
            "            secure_mode=secure,",
            "            secure_mode=False,",
            "unit/engine_arguments::secure_mode_reaches_the_optimizer",
        ),
        (
            "A make_private that fails leaves the model with hooks.",
            "                self._flash_clip_module.cleanup()",
            "                pass",
            ("unit/engine_arguments", "integration/flash_clip_refusals", "integration/automatic_mode"),
        ),
    ],
    "clipping/proof/opacus_modes.py": [
        (
            "check= of Opacus' modes accepts any sum.",
            "if not relative <= error:",
            "if relative < 0:",
            "integration/check_opacus_modes::a_wrong_sum_is_refused_at_checked_steps_only",
        ),
        (
            "check= of Opacus' modes accepts sums that are a thousand times too large.",
            "\n_TOLERANCE = 1e-3",
            "\n_TOLERANCE = 1e3",
            "integration/check_opacus_modes::a_wrong_sum_is_refused_at_checked_steps_only",
        ),
        (
            "check= of Opacus' modes accepts mixing.",
            "                    forward.refuse_mixing()",
            "                    pass",
            "integration/check_opacus_modes::mixing_is_refused_and_nothing_changes",
        ),
        (
            "check= of Opacus' modes accepts a penalty that they leave out.",
            "            self._refuse_beside(forwards, parameters)\n",
            "            pass\n",
            "integration/check_opacus_modes::a_penalty_that_the_mode_leaves_out_is_refused",
        ),
        (
            "A copy of a model of Opacus' modes has a copy of the check.",
            "        return _OwnHook, ()",
            "        return _OwnHook, (self._method,)",
            "integration/check_opacus_modes::copies_of_the_model_are_not_checked",
        ),
        (
            "check= of Opacus' modes accepts noise that is in proportion to another bound.",
            "        self._refuse_bounds()\n",
            "",
            "integration/check_opacus_modes::a_bound_that_moves_without_its_list",
        ),
        (
            "check= of Opacus' modes compares the last part of a batch with the sum of all.",
            "        if self._expected is None:\n            self._expected = [",
            "        if True:\n            self._expected = [",
            "integration/check_opacus_modes::batches_in_parts",
        ),
    ],
    "clipping/proof/by_hand.py": [
        (
            "check= of Opacus' modes exchanges samples in one direction alone.",
            "    for half in halves(samples) if samples > 1 else ():",
            "    for half in halves(samples)[::2] if samples > 1 else ():",
            "integration/check_opacus_modes::every_ordered_pair_of_samples_is_told_apart",
        ),
    ],
    "clipping/opacus_functions.py": [
        (
            "unregister() leaves Opacus' functions replaced.",
            "    _replace_everywhere({ours: original for original, ours in _replaced.items()})\n",
            "",
            "integration/register_flash_clip::unregistering",
        ),
        (
            "A registered module clips to a bound of 1, whatever its optimizer has.",
            "        hooks.bookkeeping.rule = rule\n",
            "",
            (
                "integration/register_flash_clip::the_engine_of_opacus",
                "integration/register_flash_clip::without_a_wrapper_and_per_layer",
            ),
        ),
    ],
    "clipping/module/attached_hooks.py": [
        (
            "The optimizer holds parameters that nobody clips.",
            "    if strangers:",
            "    if False:",
            "integration/register_flash_clip::refusals",
        ),
        (
            "A sample's gradient is clipped in each model by itself.",
            "    if len(owners) > 1:",
            "    if False:",
            "integration/register_flash_clip::refusals",
        ),
    ],
    "clipping/modes.py": [
        (
            "Ghost clips by squared norms.",
            "squares.sqrt_() for parameter",
            "squares for parameter",
            "integration/flash_clip_norms::samplers_for_plain_ghost_clipping",
        ),
    ],
}
