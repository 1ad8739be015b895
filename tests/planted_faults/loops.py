# SPDX-License-Identifier: Apache-2.0
"""Faults in the check of a program's own loop: `opacus-memprof doctor --script`."""

from tests.planted_faults.fault import Fault, integration


def _fault(name: str, file: str, before: str, after: str, why: str, *tests: str) -> Fault:
    return Fault(name, file, before, after, why, integration(*tests), room="loop_check")


def _explained(case: str) -> str:
    return f"script_check::a_defect_is_found_and_explained[{case}-]"


def _exact(case: str) -> str:
    return f"script_check::a_right_loop_is_exact[{case}]"


def _unchecked(case: str) -> str:
    return f"script_check::what_was_not_checked_is_said[{case}-]"


_DELIVERIES = [
    _fault(
        "loop_takes_every_loader_for_a_private_one",
        "deliveries.py",
        "        is_private = sampler is not None\n",
        "        is_private = True\n",
        "Batches of the loader that make_private was given pass for those that it returned.",
        _explained("original_loader-hooks"),
    ),
    _fault(
        "loop_forgets_the_loader_of_make_private",
        "deliveries.py",
        '        self._samplers.append(getattr(prepared, "_index_sampler", None))\n',
        "",
        "Without Poisson sampling, the private loader is not known.",
        _exact("plain-hooks"),
    ),
    _fault(
        "loop_lets_samples_be_drawn_twice",
        "deliveries.py",
        '            if getattr(sampler, "replacement", False):\n',
        "            if False:\n",
        "A sample that is in a batch several times contributes up to the bound several times.",
        _explained("with_replacement-hooks"),
    ),
    _fault(
        "loop_does_not_follow_samplers_of_samplers",
        "deliveries.py",
        '            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))\n',
        "            sampler = None\n",
        "BatchMemoryManager's batches pass for those of another loader.",
        _exact("memory_manager-hooks"),
    ),
    _fault(
        "loop_forgets_used_batches",
        "deliveries.py",
        "                each.used.add(id(optimizer))\n",
        "                pass\n",
        "Several steps with a batch are not noticed while other batches are drawn.",
        _explained("fixed_in_loop-hooks"),
    ),
    _fault(
        "loop_does_not_count_batches",
        "deliveries.py",
        "        elif self._drawn < steps or any(\n",
        "        elif any(\n",
        "A batch that is augmented anew for each step is not noticed.",
        _explained("fixed_augmented-hooks"),
    ),
    _fault(
        "loop_forgets_batches_of_other_loaders",
        "deliveries.py",
        "        elif others and len(found) < len(calls):\n",
        "        elif False:\n",
        "Changed batches of two loaders pass for those of the private one.",
        _unchecked("zipped_and_changed"),
    ),
    _fault(
        "loop_takes_generated_inputs_for_a_batch",
        "deliveries.py",
        "        elif self._drawn < steps and self._is_matched and not found:\n",
        "        elif False:\n",
        "A step on inputs that the program generates is called a repeated batch.",
        _unchecked("generated"),
    ),
]

_ACCOUNTANT = [
    _fault(
        "loop_does_not_compare_noise_with_the_accountant",
        "deliveries.py",
        "        if noise < counted * (1 - 1e-6):\n",
        "        if noise > counted * (1 + 1e-6):\n",
        "Less noise than the accountant counts is not noticed.",
        _explained("less_noise-hooks"),
    ),
    _fault(
        "loop_compares_noise_with_earlier_steps",
        "deliveries.py",
        "        accounted, self._accounted = self._accounted, []\n",
        "        accounted = self._accounted\n",
        "Noise that the accountant has counted is called too small after it fell.",
        _exact("less_noise_later-hooks"),
    ),
    _fault(
        "loop_compares_rates_loosely",
        "deliveries.py",
        "        if drawn > rate * (1 + 1e-6):\n",
        "        if drawn > 10 * rate:\n",
        "Four times the sampling rate that the accountant counts is not noticed.",
        _explained("other_rate-flash_clip"),
    ),
    _fault(
        "loop_is_content_without_an_accountant",
        "deliveries.py",
        "            if self._samplers:\n",
        "            if False:\n",
        "Steps that no accountant counts are not said.",
        _unchecked("uncounted"),
    ),
]

_SCALES_AND_CHANGES = [
    _fault(
        "loop_does_not_know_gradscaler",
        "loss.py",
        "        scaled = id(loss) in self._scaled\n",
        "        scaled = False\n",
        "GradScaler's factor, with which all samples are clipped, is a note.",
        _explained("scaled-hooks"),
    ),
    _fault(
        "loop_inverts_the_loss_scale",
        "loss.py",
        'factor * constant if node.name() == "MulBackward0" else factor / constant',
        'factor / constant if node.name() == "MulBackward0" else factor * constant',
        "The factor of the loss is its inverse.",
        _explained("scaled-hooks"),
    ),
    _fault(
        "loop_does_not_compare_parameters_between_steps",
        "update_check.py",
        "if name in left and not is_same(x, left[name])]",
        "if name in left and False]",
        "Parameters that change between two steps are not said.",
        _unchecked("changed_outside"),
    ),
    _fault(
        "loop_forgets_the_parameters_after_a_step",
        "update_check.py",
        "        return {name: x.detach().clone() for name, x in self._root.published().items()}\n",
        "        return {}\n",
        "Nothing is known about parameters between two steps.",
        _unchecked("changed_outside"),
    ),
    _fault(
        "loop_forgets_buffers",
        "records.py",
        "[*self.model.named_parameters(), *self.model.named_buffers()]",
        "self.model.named_parameters()",
        "A buffer that the program computes from samples is published without a word.",
        _unchecked("moving_center"),
    ),
    _fault(
        "loop_is_content_with_rates_that_follow_losses",
        "follow.py",
        '        _around(ReduceLROnPlateau, "step", self._plateau_step)\n',
        "",
        "Learning rates that were computed from losses of samples are not said.",
        _unchecked("plateau"),
    ),
    _fault(
        "loop_takes_shortened_gradients_for_a_divisor",
        "update_check.py",
        "            if not (is_scaled or is_turned):\n",
        "            if not is_turned:\n",
        "Gradients that the program scales after noise are called a wrong divisor.",
        _unchecked("clipped_after_noise"),
    ),
    _fault(
        "loop_passes_over_refusals",
        "explain.py",
        "    if isinstance(error, MemprofError):\n",
        "    if False:\n",
        "A training that flash_clip refuses in its second step has no defect.",
        _explained("same_noise-flash_clip"),
    ),
    _fault(
        "loop_does_not_see_updates_by_hand",
        "follow.py",
        "        root.changes += bool(moved)\n",
        "",
        "A program that updates parameters without the private optimizer has nothing to check.",
        _explained("updated_by_hand-hooks"),
    ),
    _fault(
        "loop_does_not_see_changed_per_sample_gradients",
        "follow.py",
        "            if now and not is_same:\n",
        "            if not now:\n",
        "A sum of per-sample gradients that the program changed is called wrong.",
        _unchecked("multiplicity"),
    ),
    _fault(
        "loop_does_not_look_for_noise_in_gradients",
        "update_check.py",
        "    return share > 12 / math.sqrt(noise.numel()) and _cosine(gradient, noise) < share / 2\n",
        "    return False\n",
        "Gradients without noise in the place of noised ones are not a defect.",
        _explained("noiseless-hooks"),
    ),
    _fault(
        "loop_calls_each_change_of_gradients_noiseless",
        "update_check.py",
        "_cosine(gradient, noise) < share / 2\n",
        "_cosine(gradient, noise) < 2 * share\n",
        "Gradients that were changed after noise are called gradients without noise.",
        _unchecked("gradients_halved"),
    ),
    _fault(
        "loop_trusts_the_optimizers_reduction",
        "update_check.py",
        '        if self._root.hooks.loss_reduction == "sum":\n',
        '        if self._optimizer.loss_reduction == "sum":\n',
        "A sum that should be a mean is not noticed.",
        _explained("two_reductions-hooks"),
    ),
    _fault(
        "loop_does_not_compare_inner_losses",
        "loss.py",
        '        of_samples = total / size if call.root.hooks.loss_reduction == "mean" else total\n',
        "        of_samples = call.outputs[i].double()\n",
        "A mean over all valid labels in the model is not noticed while all samples are clipped.",
        _explained("valid_labels-hooks"),
    ),
    _fault(
        "loop_does_not_see_repeated_noise",
        "follow.py",
        "float((old - new).abs().max()) < 1e-2",
        "float((old - new).abs().max()) < 0",
        "Noise from a generator that is seeded in each step is not noticed.",
        _explained("same_noise-hooks"),
    ),
]

FAULTS = [*_DELIVERIES, *_ACCOUNTANT, *_SCALES_AND_CHANGES]
