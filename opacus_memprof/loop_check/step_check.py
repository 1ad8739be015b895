# SPDX-License-Identifier: Apache-2.0
"""Checks one logical step: its clipped sum here, what becomes of it in update_check.py."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from opacus_memprof.clipping.forwards.state import GivenRows
from opacus_memprof.loop_check.by_hand import (
    Batch,
    Gradients,
    check_noise,
    clip_by_hand,
    mixing_module,
    size_of,
)
from opacus_memprof.loop_check.explain import exact_modes
from opacus_memprof.loop_check.loss import check_inner_loss, check_reduction, check_scale
from opacus_memprof.loop_check.records import (
    Findings,
    LogicalStep,
    NotCheckedError,
    PhysicalBatch,
    PrivateModel,
    StepResult,
    listed,
    physical_batches,
)
from opacus_memprof.loop_check.update_check import UpdateCheck

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of clipped sums; other dtypes: 5e-2
_SMALLEST = 1e-3  # an error is relative to at least this fraction of the largest element of all parameters
_MOST_KEPT = 8  # sums of physical batches that are kept to explain a wrong total


def clip_bound(optimizer: DPOptimizer, given: Any) -> float | list[float]:
    """Returns the bound that clipping must have now to match the noise.

    Args:
        optimizer: the private optimizer.
        given: the bound with which it was made.
    """
    bound = float(optimizer.max_grad_norm)
    if own := getattr(getattr(getattr(optimizer, "bookkeeping", None), "rule", None), "bounds", None):
        return list(own)  # flash_clip's, which a program may set
    if not isinstance(given, (list, tuple)):
        return bound
    scale = bound / math.sqrt(sum(each * each for each in given))  # schedulers change only the total bound
    return [each * scale for each in given]


def noise_std(optimizer: DPOptimizer) -> float:
    """Returns the standard deviation of the clipped sum's noise according to the optimizer's settings."""
    adjusted = getattr(optimizer, "_adjusted_noise_multiplier", None)  # of adaptive clipping in ghost mode
    multiplier = float(optimizer.noise_multiplier if adjusted is None else adjusted)
    count_std = getattr(optimizer, "unclipped_num_std", None)
    if count_std and multiplier and adjusted is None:  # Theorem 1 of Andrew et al. 2021, arXiv 1905.03871
        multiplier = (multiplier**-2 - (2 * count_std) ** -2) ** -0.5
    return multiplier * float(optimizer.max_grad_norm)


class StepCheck:
    """Checks a logical step before and after the original optimizer's step.

    Args:
        optimizer: the private optimizer.
        given: the clipping bound with which it was made.
        root: the private model that it trains.
        step: the recorded data.
        findings: receives the defects and notes.
    """

    def __init__(
        self, optimizer: DPOptimizer, given: Any, root: PrivateModel, step: LogicalStep, findings: Findings
    ) -> None:
        self.result = StepResult(len(step.batches), sum(map(_samples, step.batches)))
        self.noise_sample = torch.empty(0)
        self._optimizer = optimizer
        self._given = given
        self._root = root
        self._step = step
        self._findings = findings
        names = root.names()
        self._trained = {names[id(p)]: p for p in optimizer.params if id(p) in names}  # in the order of the bounds
        self._update = UpdateCheck(optimizer, root, step, self._trained, findings)
        rule = getattr(getattr(optimizer, "bookkeeping", None), "rule", None)
        self._is_automatic = getattr(rule, "clipping", None) == "automatic"
        # Ghost clipping computes the norms over all trained parameters of the model.
        self._clipped = list(root.trained()) if root.mode == "ghost" else list(self._trained)

    def before_update(self, left: Mapping[str, torch.Tensor]) -> None:
        """Compares sums and noise, and repeats the update on copies.

        Args:
            left: the parameters' values after the step before, by name.
        """
        self._update.check_parameters(left)
        try:
            self._check_sum()
            norms = self.result.norms
        except NotCheckedError as error:
            self._findings.not_checked("the clipped sum", str(error), "sum")
            norms = []
        check_scale(self._step, norms, self._is_automatic, self._findings)
        check_reduction(self._step, self._root.hooks.loss_reduction, self._findings)
        self._check_given_once()
        for p in self._trained.values():
            if id(p) not in self._step.noised and p.grad is not None:
                self._step.noised[id(p)] = p.grad.detach().double() * self._update.expected_divisor()
        self._update.check_gradients()
        self.result.noise, self.noise_sample = check_noise(self._step, self._trained, self._findings)
        self._update.check_divisor()
        self._update.repeat_update()

    def after_update(self) -> dict[str, torch.Tensor]:
        """Compares the parameters with the repeated update. Returns their values, by name."""
        return self._update.after_update()

    def _check_sum(self) -> None:
        if any(call.root is not self._root for batch in self._step.batches for call in batch.calls):
            raise NotCheckedError("the optimizer holds parameters of several private models.")
        if any(batch.is_changed for batch in self._step.batches):
            raise NotCheckedError("the script changes the per-sample gradients between backward and step.")
        hands = [clip_by_hand(batch, batch.bound, self._clipped, self._is_automatic) for batch in self._step.batches]
        expected = _sum([hand.total for hand in hands])
        result = self.result
        result.norms = [norm for hand in hands for norm in hand.norms]
        result.clipped = sum(hand.clipped for hand in hands)
        if not result.norms:
            return
        if not all(map(math.isfinite, result.norms)):
            raise NotCheckedError("a sample's gradient is not finite.")
        found = {name: self._step.summed.get(id(p)) for name, p in self._trained.items()}
        if any(each is None for each in found.values()):
            self._findings.not_checked(
                "errors of the clipped sum that are smaller than the noise",
                "the optimizer does not keep the sum without noise.",
            )
            self._step.summed = {id(p): expected[name].flatten() for name, p in self._trained.items()}
            return
        dtypes = {p.dtype for p in self._trained.values()} | {
            x.dtype for batch in self._step.batches for call in batch.calls for x in call.outputs.values()
        }
        result.tolerance = max(_TOLERANCE.get(dtype, 5e-2) for dtype in dtypes)
        totals = {name: each.double() for name, each in found.items() if each is not None}
        result.errors = relative_errors(totals, expected)
        wrong = [name for name, error in result.errors.items() if error > result.tolerance]
        outside = self._from_outside(hands)
        if wrong and outside:
            result.errors = {}
            raise NotCheckedError(
                f"the outputs of the model do not explain the gradients of {listed(outside)}: a term of the loss "
                "comes from elsewhere, such as an attribute of the model; return what it is computed from."
            )
        if wrong:
            self._findings.defect(self._explain_sum(wrong, totals, hands), "sum")
        else:
            self._check_norms(hands[-1])
        if outside and not wrong:
            self._findings.defect(
                f"A part of the loss comes from {listed(outside)} directly and not through the outputs of the model, "
                f"as a penalty on parameters does. grad_sample_mode={self._root.mode!r} leaves it out, so that it has "
                "no effect: use the optimizer's weight_decay.",
                "outside",
            )
        self._check_mixing()

    def _from_outside(self, hands: Sequence[Batch]) -> list[str]:
        """Returns the parameters whose gradient, as autograd finds it, is not the one by hand."""
        found = _sum([{n: g.double() for n, g in batch.gradients.items()} for batch in self._step.batches])
        expected = _sum([hand.gradient for hand in hands])
        known = {name: g for name, g in expected.items() if all(name in b.gradients for b in self._step.batches)}
        return [name for name, error in relative_errors(found, known).items() if error > self.result.tolerance]

    def _check_given_once(self) -> None:
        known: list[GivenRows] = []
        for batch in self._step.batches:
            own = [call.rows for call in batch.calls if call.rows is not None]
            if any(a.overlap(b) for a in own for b in known):
                self._findings.defect(
                    "The script calls backward several times on the same samples before a step, and each time they "
                    "are clipped anew: one sample contributes up to the bound several times, but the noise is for "
                    "once. Add up the losses of a sample, and call backward() once.",
                    "same samples",
                )
            known += own

    def _check_norms(self, last: Batch) -> None:
        """Compares the norms that the mode computed. Wrong norms do not affect the sum while nothing is clipped."""
        norms = getattr(self._root.hooks, "per_sample_gradient_norms", None)
        if not isinstance(norms, torch.Tensor) or norms.shape != (len(last.norms),) or isinstance(self._given, list):
            return
        scale = max(last.norms)
        error = max(abs(a - b) / max(b, 1e-3 * scale) for a, b in zip(norms.tolist(), last.norms, strict=True))
        if error > self.result.tolerance:
            exact = exact_modes(self._step.batches[-1].calls[0], self._root.mode)
            self._findings.defect(
                f"grad_sample_mode={self._root.mode!r} finds wrong gradient norms for this model: they are off by up "
                f"to {error:.1%}, so that samples are clipped to another bound than the one that the noise is for."
                + (f" Exact for this model and batch: {', '.join(exact)}." if exact else ""),
                "norms",
            )

    def _explain_sum(self, wrong: list[str], found: Gradients, hands: list[Batch]) -> str:
        """Returns how the sum differs and, if possible, of which sums it consists."""
        worst = max(wrong, key=lambda name: self.result.errors[name])
        expected = _sum([hand.total for hand in hands])
        size, cosine = _compare(found, expected)
        what = (
            f"grad_sample_mode={self._root.mode!r} does not clip this loop exactly: the clipped sum of "
            f"{len(self.result.norms)} samples in {physical_batches(len(hands))} is "
            f"{size:.3g} times as large as the one computed by hand (cosine {cosine:.3f}); {len(wrong)} of "
            f"{len(self.result.errors)} parameters are off by up to {self.result.errors[worst]:.1%} ({worst})."
        )
        if self._root.mode == "ghost" and any(batch.is_plain for batch in self._step.batches):
            return (
                f"{what} The loss is not that of the criterion which make_private returned, without which ghost "
                "clipping clips nothing: compute the loss with that criterion, and call its backward()."
            )
        names = [name for name in expected if name in found]
        if 1 < len(hands) <= _MOST_KEPT:
            parts = torch.stack([_flat(hand.total, names) for hand in hands], 1)
            target = _flat(found, names).unsqueeze(1)
            weights = torch.linalg.lstsq(parts, target).solution
            if _is_small(parts @ weights - target, target, self.result.tolerance):
                return f"{what} {_weights_sentence(weights.flatten().tolist(), self._step.accumulated)}"
        for bound, sentence in self._other_bounds():
            other = _sum([clip_by_hand(batch, bound, self._clipped).total for batch in self._step.batches])
            if max(relative_errors(found, other).values()) <= self.result.tolerance:
                return f"{what} {sentence}"
        if any(
            cotangent.dim() == 0 for b in self._step.batches for c in b.calls for cotangent in c.cotangents.values()
        ):
            return (
                f"{what} The model computes one loss for the batch: if that is a mean over all valid labels, a "
                "sample's share depends on the other samples; return a loss that is the mean of the samples' losses."
            )
        exact = exact_modes(self._step.batches[0].calls[0], self._root.mode) if len(hands) == 1 else []
        return f"{what} Exact for this model and batch: {', '.join(exact)}." if exact else what

    def _other_bounds(self) -> list[tuple[float | list[float], str]]:
        """Returns other bounds that the optimizer may have used, and what each means."""
        others: list[tuple[float | list[float], str]] = [(math.inf, "That is the sum without any clipping.")]
        now = f"{float(self._optimizer.max_grad_norm):.4g}"
        old = getattr(self._root.hooks, "max_grad_norm", None)
        if isinstance(old, (int, float)):
            others.append(
                (
                    float(old),
                    f"The samples are clipped to {old:.4g}, the model's bound, but the noise is that of the bound "
                    f"{now} of the optimizer: a scheduler that changes optimizer.max_grad_norm does not reach the "
                    "model in this mode. Set both.",
                )
            )
        if isinstance(self._given, list):
            others.append(
                (
                    [float(each) for each in self._given],
                    f"The parameters are clipped to the bounds that the optimizer was made with, but the noise is that "
                    f"of the bound {now}: the scheduler changes optimizer.max_grad_norm, but not the parameters' "
                    "bounds. Use a scheduler of the noise instead.",
                )
            )
        return others

    def _check_mixing(self) -> None:
        for batch in self._step.batches[:1]:
            for call in batch.calls:
                try:
                    check_inner_loss(call, self._findings)
                    found = mixing_module(call)
                except NotCheckedError as error:
                    self._findings.not_checked("whether samples are processed separately", str(error), "mixing")
                    return
                if found is not None:
                    name, size = found
                    by = f"by {size:.1%}"
                    if name:
                        by = f"in {name} ({type(self._root.model.get_submodule(name)).__name__}) {by}"
                    self._findings.defect(
                        f"The samples of a batch are not processed separately: other samples change a sample's "
                        f"output {by}, so that clipping its gradient does not bound its influence. "
                        "Use layers that compute each sample alone (for BatchNorm, GroupNorm).",
                        "mixing",
                    )


def relative_errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Returns the largest error of each parameter, relative to the largest element of its expected sum."""
    largest = max((float(each.abs().max()) for each in expected.values() if each.numel()), default=0.0)
    errors = {}
    for name, each in expected.items():
        if name in found and each.numel():
            scale = max(float(each.abs().max()), _SMALLEST * largest) or 1.0
            errors[name] = float((found[name].reshape(each.shape) - each).abs().max()) / scale
    return errors


def _sum(totals: list[Gradients]) -> Gradients:
    result: Gradients = {}
    for total in totals:
        for name, each in total.items():
            result[name] = result[name] + each if name in result else each
    return result


def _flat(gradients: Gradients, names: list[str]) -> torch.Tensor:
    pieces = [gradients[name].flatten() for name in names if name in gradients]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)


def _compare(found: Gradients, expected: Gradients) -> tuple[float, float]:
    """Returns the norm of the found gradients over that of the expected ones, and the cosine between them."""
    names = [name for name in expected if name in found]
    a, b = _flat(found, names), _flat(expected, names)
    norms = float(a.norm()), float(b.norm())
    if not all(norms):
        return 0.0, 0.0
    return norms[0] / norms[1], float(a @ b) / (norms[0] * norms[1])


def _is_small(rest: torch.Tensor, target: torch.Tensor, tolerance: float) -> bool:
    return float(rest.norm()) <= tolerance * float(target.norm())


def _samples(batch: PhysicalBatch) -> int:
    try:
        return size_of(batch.calls[0])
    except NotCheckedError:
        return 1  # unknown, but not empty


def _weights_sentence(weights: list[float], accumulated: int) -> str:
    rounded = [round(weight, 2) + 0.0 for weight in weights]  # without -0
    parts = ", ".join(f"physical batch {i + 1} counts {weight:.2f} times" for i, weight in enumerate(rounded))
    sentence = f"It is a sum in which {parts}, instead of once each."
    if rounded[0] != 0:
        return sentence
    if accumulated > 1:
        return (
            f"{sentence} Each backward drops the gradients of the batches before, as ghost clipping does in Opacus: "
            "use BatchMemoryManager, or flash_clip, instead of several backward calls for one step."
        )
    return (
        f"{sentence} The optimizer loses the batches of skipped steps, as ghost clipping did in Opacus before 1.5.3: "
        "update Opacus, or use flash_clip."
    )
