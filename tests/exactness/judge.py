# SPDX-License-Identifier: Apache-2.0
"""Judges a program: runs it under flash_clip without noise and compares every step with clipping by hand.

The oracle is plain autograd on a second copy of the model in float64, one sample at a time. Programs that draw random
numbers have no sample alone: their oracle is one forward of the whole batch from the same seeds, and one backward per
sample from that sample's loss.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.errors import MemprofError
from tests.exactness.tensors import (
    Batch,
    Sums,
    cast,
    cast_model,
    gradient_of,
    load_state,
    norm_of,
    seed_all,
    select,
    size_of,
    state_of,
    widened,
)

Losses = Callable[[Any, Batch], torch.Tensor]
"""Losses of a model and a batch: [B], or a scalar if the model computes its loss."""
Change = Callable[[Any, Any], None]
"""Changes the program before a step: called with the model (the wrapper, in the private program) and with the optimizer
(None for the oracle)."""
Outcome = Literal["exact", "refused", "wrong", "crash"]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_SEVERITY: list[Outcome] = ["exact", "refused", "crash", "wrong"]


@dataclass(frozen=True)
class Step:
    """One optimizer step: its physical batches, and what happens to the program before it."""

    batches: Sequence[Batch]
    change: Change | None = None


def step(batch: Batch, change: Change | None = None) -> Step:
    """Returns a step of a single physical batch."""
    return Step([batch], change)


@dataclass(frozen=True)
class Settings:
    """How a program is run.

    Attributes:
        dtype: of parameters and floating-point inputs.
        reduction: of the loss over the batch.
        passes: flash_clip_passes.
        clipping: "flat", "per_layer" or "automatic".
        bound: the clipping bound; None for the median of the first step's norms.
        is_random: whether the model draws random numbers; see the module's docstring.
        holds_frozen: whether the optimizer holds parameters that do not require grad, too.
        autocast: dtype of autocast, if any.
        tolerance: relative error of norms and sums; None for that of the dtype.
        removes: whether the contribution of single samples is measured in accepted programs, by removing them.
        module_options: further arguments of GradSampleModuleFlashClip.
    """

    dtype: torch.dtype = torch.float64
    reduction: str = "sum"
    passes: Any = 1
    clipping: Any = "flat"
    bound: float | None = None
    is_random: bool = False
    holds_frozen: bool = False
    autocast: torch.dtype | None = None
    tolerance: float | None = None
    removes: bool = False
    module_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a program did.

    Attributes:
        outcome: "exact", "refused", "wrong" or "crash".
        error: the largest relative error of a norm or a clipped sum.
        message: of the refusal or the crash, or what was wrong.
        at: the step that decided the outcome.
        contribution: the largest contribution of a removed sample, in units of the bound; NaN if not measured.
    """

    outcome: Outcome
    error: float = 0.0
    message: str = ""
    at: int = 0
    contribution: float = math.nan

    def worse(self, other: "Verdict") -> "Verdict":
        """Returns the worse of two verdicts."""
        return max(self, other, key=lambda v: (_SEVERITY.index(v.outcome), v.error))


@dataclass
class _Private:
    """The program under flash_clip: norms of the last physical batch and sums, by step."""

    norms: list[list[float]] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)
    states: list[Sums] = field(default_factory=list)
    stopped: BaseException | None = None
    complaint: str = ""


def judge(
    build: Callable[[], nn.Module], steps: Callable[[], Sequence[Step]], losses: Losses, seed: int = 0, **options: Any
) -> Verdict:
    """Judges a program.

    Args:
        build: builds the model; called several times with the same seed.
        steps: makes the steps; called several times with the same seed.
        losses: see ``Losses``.
        seed: of the model, the data and the random numbers of every forward.
        options: see ``Settings``.
    """
    settings = Settings(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Judge(build, steps, losses, seed, settings).verdict()


class _AloneError(Exception):
    """The model does not run on one sample."""


class _Judge:
    def __init__(
        self,
        build: Callable[[], nn.Module],
        steps: Callable[[], Sequence[Step]],
        losses: Losses,
        seed: int,
        settings: Settings,
    ) -> None:
        self.build, self.losses, self.seed, self.settings = build, losses, seed, settings
        seed_all(seed + 1)
        self.steps = [replace(each, batches=[cast(b, settings.dtype) for b in each.batches]) for each in steps()]
        self.bound = settings.bound or 1.0

    def verdict(self) -> Verdict:
        self.bound = self.settings.bound or self._median_norm()
        private = self._run(self.steps)
        try:
            verdict = self._compare(private)
        except _AloneError as error:
            verdict = Verdict("wrong", math.inf, f"a sample has no gradient of its own: {error.__cause__!r}")
        if private.complaint:
            return Verdict("wrong", math.inf, private.complaint, len(private.sums))
        if private.stopped is not None and verdict.outcome != "wrong":
            is_refusal = isinstance(private.stopped, MemprofError)
            kind = "" if is_refusal else f"{type(private.stopped).__name__}: "
            outcome: Outcome = "refused" if is_refusal else "crash"
            return Verdict(outcome, verdict.error, f"{kind}{private.stopped}", len(private.sums))
        if verdict.outcome == "exact" and self.settings.removes:
            return self._remove_samples(private, verdict)
        return verdict

    # --- the program under flash_clip ---
    def _run(self, steps: Sequence[Step], **options: Any) -> _Private:
        result = _Private()
        model = self._model(self.settings.dtype)
        before: Sums = {}
        trained: dict[str, bool] = {}
        try:
            module, optimizer = self._make_private(model, self.settings.module_options | options)
            for number, each in enumerate(steps):
                if each.change is not None:
                    each.change(module, optimizer)
                before = {name: p.detach().clone() for name, p in model.named_parameters()}
                trained = {name: p.requires_grad for name, p in model.named_parameters()}
                result.states.append(state_of(model))
                optimizer.zero_grad()
                for index, batch in enumerate(each.batches):
                    self._loss(module, batch, number, index).backward()
                optimizer.step()
                result.norms.append(module.per_sample_gradient_norms.double().tolist())
                mean = self.settings.reduction == "mean"
                divisor = len(each.batches) if mean else 1
                result.sums.append(
                    {n: gradient_of(p) * divisor for n, p in model.named_parameters() if p.requires_grad}
                )
        except Exception as error:
            result.stopped = error
            for name, parameter in model.named_parameters():
                if name in before and not torch.equal(before[name], parameter.detach()):
                    result.complaint = f"{name} had changed before {type(error).__name__}: {error}"
                if name in trained and parameter.requires_grad != trained[name]:
                    result.complaint = f"requires_grad of {name} changed in {type(error).__name__}: {error}"
        return result

    def _make_private(self, model: nn.Module, options: dict[str, Any]) -> tuple[Any, Any]:
        settings = self.settings
        parameters = [p for p in model.parameters() if p.requires_grad or settings.holds_frozen]
        bound: Any = self.bound
        if settings.clipping == "per_layer":
            bound = [self.bound] * len(parameters)
        module = GradSampleModuleFlashClip(
            model,
            loss_reduction=settings.reduction,
            max_grad_norm=bound,
            passes=settings.passes,
            clipping=settings.clipping,
            **options,
        )
        optimizer = DPOptimizerFlashClip(
            torch.optim.SGD(parameters, lr=1e-3 / self.bound),
            module=module,
            noise_multiplier=0.0,
            max_grad_norm=bound,
            expected_batch_size=1,
            loss_reduction=settings.reduction,
        )
        return module, optimizer

    def _loss(self, model: Any, batch: Batch, number: int, index: int) -> torch.Tensor:
        found = self._forward(model, batch, number, index)
        return found.mean() if self.settings.reduction == "mean" else found.sum()

    def _forward(self, model: Any, batch: Batch, number: int, index: int) -> torch.Tensor:
        seed_all(1000 * self.seed + 10 * number + index)
        autocast = self.settings.autocast
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            return self.losses(model, batch)

    def _model(self, dtype: torch.dtype) -> nn.Module:
        seed_all(self.seed)
        return cast_model(self.build(), dtype)

    # --- clipping by hand ---
    def _compare(self, private: _Private) -> Verdict:
        """Compares each step that was made with clipping by hand in float64.

        Where autograd in the program's own precision is further off, three times its error is allowed.
        """
        settings = self.settings
        tolerance = settings.tolerance or TOLERANCE[settings.autocast or settings.dtype]
        is_rounded = settings.dtype != torch.float64 and not settings.is_random
        own: list[tuple[list[float], Sums]] = []
        keeps_dtype = settings.is_random or settings.autocast is not None
        exact = self._by_hand(private, settings.dtype if keeps_dtype else torch.float64)
        worst = Verdict("exact")
        for number, by_hand in enumerate(exact):
            error = self._error((private.norms[number], private.sums[number]), by_hand)
            allowed = tolerance
            if not error <= tolerance and is_rounded:
                own = own or list(self._by_hand(private, settings.dtype))
                allowed = max(tolerance, 3 * self._error(own[number], by_hand))
            if not error <= allowed:
                return Verdict("wrong", error, f"{error:.3g} off in step {number}", number)
            worst = replace(worst, error=max(worst.error, error))
        return worst

    def _by_hand(self, private: _Private, dtype: torch.dtype) -> Iterator[tuple[list[float], Sums]]:
        """Yields norms of the last physical batch, and clipped sums, of each step that the private program has made."""
        model = self._model(dtype)
        for number, each in enumerate(self.steps[: len(private.sums)]):
            if each.change is not None:
                each.change(model, None)
            load_state(model, private.states[number])
            yield self._step_by_hand(model, each, number)

    def _step_by_hand(self, model: nn.Module, each: Step, number: int) -> tuple[list[float], Sums]:
        dtype = next(p for p in model.parameters() if not p.is_complex()).dtype
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        total: Sums = {}
        norms: list[float] = []
        for index, batch in enumerate(each.batches):
            norms = []
            for gradients in self._per_sample(model, cast(batch, dtype), number, index):
                norm = norm_of(gradients.values())
                norms.append(norm)
                for name in names:
                    g = gradients.get(name)
                    if g is None:
                        continue
                    of_what = norm_of([g]) if self.settings.clipping == "per_layer" else norm
                    clipped = self._factor(of_what) * g
                    total[name] = total[name] + clipped if name in total else clipped
        return norms, total

    def _factor(self, norm: float) -> float:
        """The clip factor, with the stability constants of Opacus and of automatic clipping."""
        return (
            self.bound / (norm + 0.01)
            if self.settings.clipping == "automatic"
            else min(1.0, self.bound / (norm + 1e-6))
        )

    def _per_sample(self, model: nn.Module, batch: Batch, number: int, index: int) -> Iterator[Sums]:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        size = size_of(batch)
        losses = self._forward(model, batch, number, index) if self.settings.is_random else None
        for n in range(size):
            for name, b in model.named_buffers():
                b.data.copy_(buffers[name])
            loss = self._alone(model, select(batch, [n]), number, index) if losses is None else losses[n]
            model.zero_grad()
            loss.backward(retain_graph=losses is not None)  # not autograd.grad, which reentrant checkpoints refuse
            yield {name: widened(p.grad) for name, p in parameters.items() if p.grad is not None}

    def _alone(self, model: nn.Module, sample: Batch, number: int, index: int) -> torch.Tensor:
        try:
            return self._forward(model, sample, number, index).sum()
        except Exception as error:
            raise _AloneError from error

    def _median_norm(self) -> float:
        model = self._model(torch.float64 if not self.settings.is_random else self.settings.dtype)
        first = self.steps[0]
        if first.change is not None:
            first.change(model, None)
        self.bound = 1.0
        norms, _ = self._step_by_hand(model, first, 0)
        positive = sorted(n for n in norms if n > 0) or [1.0]
        return positive[len(positive) // 2]

    def _error(self, actual: tuple[list[float], Sums], expected: tuple[list[float], Sums]) -> float:
        """The largest relative error of a norm, of the whole sum, and of each parameter's."""
        (found_norms, found), (norms, sums) = actual, expected
        # A norm far below the rule's stability constant, 1e-6, does not change the factor.
        tiny = 1e-6 + (1e-9 if self.settings.dtype == torch.float64 else 1e-4) * max([*norms, 1e-30])
        if len(found_norms) != len(norms):
            return math.inf
        errors = [abs(a - b) / max(b, tiny) for a, b in zip(found_norms, norms, strict=True)]
        size = norm_of(sums.values())
        found = {**{name: torch.zeros_like(total) for name, total in sums.items()}, **found}
        gap = norm_of([found[n] - sums[n] if n in sums else found[n] for n in found])
        errors.append(gap / max(size, 1e-3 * self.bound))
        floor = (1e-6 if self.settings.dtype == torch.float64 else 1e-1) * max(size, 1e-3 * self.bound)
        errors += [norm_of([found[n] - s]) / max(norm_of([s]), floor) for n, s in sums.items()]
        return max((e if e == e else math.inf) for e in errors)

    # --- contributions ---
    def _remove_samples(self, private: _Private, verdict: Verdict) -> Verdict:
        """Measures how much the last step's sum changes when a sample leaves.

        Removes the sample with the largest norm, with the others' losses by turns 1e20 and 1e-20 times as large, and,
        where exact sums do not bound it already, that sample and the first one with the losses as they are.
        """
        batch = self.steps[-1].batches[-1]
        size = size_of(batch)
        if size < 2:
            return verdict
        largest = max(range(size), key=lambda n: private.norms[-1][n])
        bound = self.bound
        if self.settings.clipping == "per_layer":
            bound *= math.sqrt(len(private.sums[-1]))
        worst = 0.0
        allowed = 1 + 1e-3 + torch.finfo(self.settings.dtype).eps * norm_of(private.sums[-1].values()) / bound
        limits = torch.finfo(self.settings.dtype)
        large, small = min(1e20, limits.max / 10), max(1e-20, limits.tiny)
        cases: list[tuple[list[float], int]] = []
        settings = self.settings
        is_exact = settings.dtype == torch.float64 and settings.autocast is None and settings.tolerance is None
        if "scale" not in batch or not is_exact:
            cases += [([], n) for n in {0, largest}]
        if "scale" in batch:
            both = ([large, small] * size)[: size - 1]
            cases += [(others, largest) for others in ([both] if size > 2 else [[large], [small]])]
        for others, n in cases:
            factors = batch["scale"].new_tensor([*others[:n], 1.0, *others[n:]]) if others else None
            whole = {**batch, "scale": batch["scale"] * factors} if factors is not None else batch
            rest = select(whole, [i for i in range(size) if i != n])
            # Without a proof, which takes most of a run; with it where this seems wrong.
            for options in ({"check": "off"}, {}):
                found = [self._run(self._with_last(whole), **options)] if others else [private]
                found.append(self._run(self._with_last(rest), **options))
                stopped = [each.stopped for each in found if each.stopped is not None]
                crash = next((each for each in stopped if not isinstance(each, MemprofError)), None)
                contribution = 0.0
                if not stopped:
                    a, b = (each.sums[-1] for each in found)
                    contribution = norm_of([a[name] - b[name] for name in a]) / bound
                if not stopped and contribution <= allowed:
                    break
            if crash is not None:
                return Verdict("crash", verdict.error, f"without sample {n}: {crash!r}")
            if not contribution <= allowed:
                what = f"one sample contributes {contribution:.4g} C"
                return Verdict("wrong", contribution, what, len(self.steps) - 1, contribution)
            worst = max(worst, contribution)
        return replace(verdict, contribution=worst)

    def _with_last(self, batch: Batch) -> list[Step]:
        """The steps with another last batch."""
        last = self.steps[-1]
        return [*self.steps[:-1], replace(last, batches=[*last.batches[:-1], batch])]
