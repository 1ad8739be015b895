# SPDX-License-Identifier: Apache-2.0
"""Faults in the check of a program's own loop: `opacus-memprof doctor --script`."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "loop_check/deliveries.py": [
        (
            "Batches of the loader that make_private was given pass for those that it returned.",
            "        is_private = sampler is not None\n",
            "        is_private = True\n",
            "integration/script_check::a_defect_is_found_and_explained[original_loader-hooks-]",
        ),
        (
            "Without Poisson sampling, the private loader is not known.",
            '        self._samplers.append(getattr(prepared, "_index_sampler", None))\n',
            "",
            "integration/script_check::a_right_loop_is_exact[plain-hooks]",
        ),
        (
            "A sample that is in a batch several times contributes up to the bound several times.",
            '            if getattr(sampler, "replacement", False):\n',
            "            if False:\n",
            "integration/script_check::a_defect_is_found_and_explained[with_replacement-hooks-]",
        ),
        (
            "BatchMemoryManager's batches pass for those of another loader.",
            '            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))\n',
            "            sampler = None\n",
            "integration/script_check::a_right_loop_is_exact[memory_manager-hooks]",
        ),
        (
            "Several steps with a batch are not noticed while other batches are drawn.",
            "                each.used.add(id(optimizer))\n",
            "                pass\n",
            "integration/script_check::a_defect_is_found_and_explained[fixed_in_loop-hooks-]",
        ),
        (
            "A batch that is augmented anew for each step is not noticed.",
            "        elif self._drawn < steps or any(\n",
            "        elif any(\n",
            "integration/script_check::a_defect_is_found_and_explained[fixed_augmented-hooks-]",
        ),
        (
            "Changed batches of two loaders pass for those of the private one.",
            "        elif others and len(found) < len(calls):\n",
            "        elif False:\n",
            "integration/script_check::what_was_not_checked_is_said[zipped_and_changed-]",
        ),
        (
            "A step on inputs that the program generates is called a repeated batch.",
            "        elif self._drawn < steps and self._is_matched and not found:\n",
            "        elif False:\n",
            "integration/script_check::what_was_not_checked_is_said[generated-]",
        ),
        (
            "Less noise than the accountant counts is not noticed.",
            "        if noise < counted * (1 - 1e-6):\n",
            "        if noise > counted * (1 + 1e-6):\n",
            "integration/script_check::a_defect_is_found_and_explained[less_noise-hooks-]",
        ),
        (
            "Noise that the accountant has counted is called too small after it fell.",
            "        accounted, self._accounted = self._accounted, []\n",
            "        accounted = self._accounted\n",
            "integration/script_check::a_right_loop_is_exact[less_noise_later-hooks]",
        ),
        (
            "Four times the sampling rate that the accountant counts is not noticed.",
            "        if drawn > rate * (1 + 1e-6):\n",
            "        if drawn > 10 * rate:\n",
            "integration/script_check::a_defect_is_found_and_explained[other_rate-flash_clip-]",
        ),
        (
            "Steps that no accountant counts are not said.",
            "            if self._samplers:\n",
            "            if False:\n",
            "integration/script_check::what_was_not_checked_is_said[uncounted-]",
        ),
    ],
    "loop_check/loss.py": [
        (
            "GradScaler's factor, with which all samples are clipped, is a note.",
            "        scaled = id(loss) in self._scaled\n",
            "        scaled = False\n",
            "integration/script_check::a_defect_is_found_and_explained[scaled-hooks-]",
        ),
        (
            "The factor of the loss is its inverse.",
            'factor * constant if node.name() == "MulBackward0" else factor / constant',
            'factor / constant if node.name() == "MulBackward0" else factor * constant',
            "integration/script_check::a_defect_is_found_and_explained[scaled-hooks-]",
        ),
        (
            "A mean over all valid labels in the model is not noticed while all samples are clipped.",
            '        of_samples = total / size if call.root.hooks.loss_reduction == "mean" else total\n',
            "        of_samples = call.outputs[i].double()\n",
            "integration/script_check::a_defect_is_found_and_explained[valid_labels-hooks-]",
        ),
    ],
    "loop_check/update_check.py": [
        (
            "Parameters that change between two steps are not said.",
            "if name in left and not is_same(x, left[name])]",
            "if name in left and False]",
            "integration/script_check::what_was_not_checked_is_said[changed_outside-]",
        ),
        (
            "Nothing is known about parameters between two steps.",
            "        return {name: x.detach().clone() for name, x in self._root.published().items()}\n",
            "        return {}\n",
            "integration/script_check::what_was_not_checked_is_said[changed_outside-]",
        ),
        (
            "Gradients that the program scales after noise are called a wrong divisor.",
            "            if not (is_scaled or is_turned):\n",
            "            if not is_turned:\n",
            "integration/script_check::what_was_not_checked_is_said[clipped_after_noise-]",
        ),
        (
            "Gradients without noise in the place of noised ones are not a defect.",
            "    return share > 12 / math.sqrt(noise.numel()) and _cosine(gradient, noise) < share / 2\n",
            "    return False\n",
            "integration/script_check::a_defect_is_found_and_explained[noiseless-hooks-]",
        ),
        (
            "Gradients that were changed after noise are called gradients without noise.",
            "_cosine(gradient, noise) < share / 2\n",
            "_cosine(gradient, noise) < 2 * share\n",
            "integration/script_check::what_was_not_checked_is_said[gradients_halved-]",
        ),
        (
            "A sum that should be a mean is not noticed.",
            '        if self._root.hooks.loss_reduction == "sum":\n',
            '        if self._optimizer.loss_reduction == "sum":\n',
            "integration/script_check::a_defect_is_found_and_explained[two_reductions-hooks-]",
        ),
    ],
    "loop_check/records.py": [
        (
            "A buffer that the program computes from samples is published without a word.",
            "[*self.model.named_parameters(), *self.model.named_buffers()]",
            "self.model.named_parameters()",
            "integration/script_check::what_was_not_checked_is_said[moving_center-]",
        ),
    ],
    "loop_check/follow.py": [
        (
            "Learning rates that were computed from losses of samples are not said.",
            '        _around(ReduceLROnPlateau, "step", self._plateau_step)\n',
            "",
            "integration/script_check::what_was_not_checked_is_said[plateau-]",
        ),
        (
            "A program that updates parameters without the private optimizer has nothing to check.",
            "        root.changes += bool(moved)\n",
            "",
            "integration/script_check::a_defect_is_found_and_explained[updated_by_hand-hooks-]",
        ),
        (
            "A sum of per-sample gradients that the program changed is called wrong.",
            "            if now and not is_same:\n",
            "            if not now:\n",
            "integration/script_check::what_was_not_checked_is_said[multiplicity-]",
        ),
        (
            "Noise from a generator that is seeded in each step is not noticed.",
            "float((old - new).abs().max()) < 1e-2",
            "float((old - new).abs().max()) < 0",
            "integration/script_check::a_defect_is_found_and_explained[same_noise-hooks-]",
        ),
    ],
    "loop_check/explain.py": [
        (
            "A training that flash_clip refuses in its second step has no defect.",
            "    if isinstance(error, MemprofError):\n",
            "    if False:\n",
            "integration/script_check::a_defect_is_found_and_explained[same_noise-flash_clip-]",
        ),
    ],
}
