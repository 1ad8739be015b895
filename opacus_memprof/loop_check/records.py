# SPDX-License-Identifier: Apache-2.0
"""Recorded data of a program's training steps, and the findings."""

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from torch import nn
from torch.utils._pytree import tree_leaves

from opacus_memprof.clipping.agreement import inner_model
from opacus_memprof.clipping.forwards.state import GivenRows

T = TypeVar("T")


class NotCheckedError(Exception):
    """A part of the check is impossible. The message is a sentence for the user."""


class Findings:
    """The defects that were found, and the parts that were not checked, in order.

    Of each kind only the first is kept, so that the steps of a loop do not repeat it.

    Attributes:
        defects: one or more sentences each.
        unchecked: the parts, each with the reason.
        notes: facts that are not defects, but worth knowing; one sentence each.
        failure: the error that ended a check, in one line; None if every check ended.
    """

    def __init__(self) -> None:
        self.defects: list[str] = []
        self.unchecked: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.failure: str | None = None
        self._kinds: set[str] = set()

    def defect(self, sentence: str, kind: str = "") -> None:
        """Adds a defect."""
        self._add(self.defects, sentence, kind)

    def not_checked(self, part: str, why: str, kind: str = "") -> None:
        """Adds a part that was not checked, and the reason."""
        self._add(self.unchecked, (part, why), kind)

    def note(self, sentence: str, kind: str = "") -> None:
        """Adds a fact that is worth knowing."""
        self._add(self.notes, sentence, kind)

    def _add(self, found: list[T], each: T, kind: str) -> None:
        if each not in found and kind not in self._kinds:
            found.append(each)
            if kind:
                self._kinds.add(kind)


class RandomState:
    """The states of the global random number generators of torch, Python and NumPy."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def differs(self, other: "RandomState") -> bool:
        """Returns whether numbers were drawn between the two states."""
        mine, theirs = [self._torch, *self._cuda], [other._torch, *other._cuda]
        if len(mine) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            return True
        if self._python != other._python or (self._numpy is None) != (other._numpy is None):
            return True
        return self._numpy is not None and str(self._numpy) != str(other._numpy)


class PrivateModel:
    """A model with Opacus' hooks.

    Args:
        hooks: the GradSampleModule, or the hooks object.
        outer: the module from which it was made. The model is inside it if it is DistributedDataParallel.

    Attributes:
        plain: a copy from before the hooks; None if the model cannot be copied.
        recording: whether a call is in progress.
        after_backward: the per-sample gradients that the last backward has left, and their versions.
        before_steps: the parameters at the last backward, as long as no optimizer has made a step.
        changes: how often they had changed since the backward before.
    """

    def __init__(self, hooks: AbstractGradSampleHooks, outer: nn.Module) -> None:
        self.hooks = hooks
        self.outer = outer
        self.model = inner_model(outer)
        self.recording = False
        self.after_backward: list[tuple[torch.Tensor, int]] = []
        self.before_steps: dict[str, torch.Tensor] = {}
        self.changes = 0
        self.plain: nn.Module | None = None
        self.why_no_copy = ""
        try:
            self.plain = copy.deepcopy(self.model)
        except Exception as error:  # modules can define anything here
            self.why_no_copy = first_line(error)

    @property
    def mode(self) -> str:
        """The grad_sample_mode, or the class if it has no mode."""
        names = {cls.__name__ for cls in type(self.hooks).__mro__}
        if "FlashClipHooks" in names:
            return "flash_clip"
        if "GradSampleHooksFastGradientClipping" in names:
            return "ghost"
        if "GradSampleModuleExpandedWeights" in names:
            return "ew"
        if "GradSampleHooks" in names:
            return "functorch" if getattr(self.hooks, "force_functorch", False) else "hooks"
        return type(self.hooks).__name__

    def names(self) -> dict[int, str]:
        """The names of the parameters by id."""
        return {id(p): name for name, p in self.model.named_parameters()}

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require grad."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def published(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that are real numbers: counters say nothing about the data."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: x for name, x in tensors if x.is_floating_point() or x.is_complex()}

    def per_sample_gradients(self) -> list[tuple[torch.Tensor, int]]:
        """The per-sample gradients that Opacus keeps in the parameters, and how often each was written to."""
        kept = tree_leaves([getattr(p, "grad_sample", None) for p in self.trained().values()])
        return [(x, x._version) for x in kept if isinstance(x, torch.Tensor)]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients that autograd has summed up in the parameters."""
        grads = {name: p.grad for name, p in self.trained().items()}
        return {name: g.detach().clone() for name, g in grads.items() if g is not None and not g.is_sparse}


@dataclass
class Delivery:
    """A batch that a data loader gave to the program.

    Attributes:
        is_private: whether the loader is one of make_private, or does Poisson sampling.
        rate: the rate of Poisson sampling; 0 without.
        used: ids of the optimizers that have made a step with it.
    """

    is_private: bool
    rate: float
    tensors: list[torch.Tensor]
    used: set[int] = field(default_factory=set)


@dataclass
class Call:
    """One training call of a private model.

    Attributes:
        outputs: the tensors among the leaves of the output that require grad, by index of the leaf.
        cotangents: the gradients that arrived at them in backward.
        in_pass: the backward call in which the first one arrived.
        sources: the loaders' batches that the inputs are part of.
        rows: the rows of memory that it was given as samples; None if there are none.
        nodes: autograd's nodes of the outputs.
    """

    root: PrivateModel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    buffers: dict[str, torch.Tensor]
    training: list[bool]
    autocast: Callable[[], Any]
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    cotangents: dict[int, torch.Tensor] = field(default_factory=dict)
    in_pass: int = 0
    sources: list[Delivery] = field(default_factory=list)
    rows: GivenRows | None = None
    nodes: list[Any] = field(default_factory=list)


@dataclass
class PhysicalBatch:
    """The calls whose outputs one backward call started from.

    Attributes:
        factor: the constant that the loss was multiplied by directly before backward.
        scaled: whether a GradScaler scaled the loss.
        bound: the clipping bound when the optimizer clipped the batch; a list for one bound per parameter.
        is_changed: whether the program has changed the per-sample gradients after backward.
        is_plain: whether the loss was not one of Opacus' ghost clipping.
        reductions: how the loss is reduced over the samples, "mean" or "sum", where its graph tells.
        gradients: what autograd itself has added to each parameter's `grad`, by name, where it does.
    """

    calls: list[Call]
    factor: float
    scaled: bool
    bound: float | list[float] = 0.0
    is_changed: bool = False
    is_plain: bool = True
    reductions: set[str] = field(default_factory=set)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class LogicalStep:
    """The recorded data of one logical step.

    Attributes:
        batches: physical batches since the last step.
        accumulated: physical batches since the last call of `optimizer.step()`, including skipped ones.
        std: the requested standard deviation.
        summed: the optimizer's clipped sums before noise, by id of the parameter.
        noised: the same with noise.
        scaled: the norms of the gradients that the private optimizer has left to the original one, by id.
    """

    batches: list[PhysicalBatch]
    accumulated: int
    std: float
    summed: dict[int, torch.Tensor] = field(default_factory=dict)
    noised: dict[int, torch.Tensor] = field(default_factory=dict)
    scaled: dict[int, float] = field(default_factory=dict)


@dataclass
class StepResult:
    """The measurements of one logical step.

    Attributes:
        batches: number of physical batches.
        samples: number of samples in them.
        norms: the samples' gradient norms, computed by hand.
        clipped: the number of samples that were clipped.
        errors: the largest error of each parameter's clipped sum, relative to its largest element.
        tolerance: the largest error that counts as exact.
        noise: standard deviation of the noise relative to the requested one; None without noise.
    """

    batches: int
    samples: int
    norms: list[float] = field(default_factory=list)
    clipped: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    noise: float | None = None


def first_line(error: object) -> str:
    """Returns the first line of an error, with its type."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def physical_batches(count: int) -> str:
    """Formats a number of physical batches: `1 physical batch`, `2 physical batches`."""
    return f"{count} physical batch{'' if count == 1 else 'es'}"


def listed(names: list[str], most: int = 4) -> str:
    """Returns the names for a sentence, shortened."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
