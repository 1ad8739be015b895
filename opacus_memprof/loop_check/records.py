# SPDX-License-Identifier: Apache-2.0
"""Recorded data of a program's training steps, and the findings."""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch import nn
from torch.utils._pytree import tree_leaves

from opacus_memprof.clipping.agreement import inner_model
from opacus_memprof.clipping.forwards.state import GivenRows

T = TypeVar("T")
_MANY = 1 << 62  # rows of a batch without tensors


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

    def per_sample_gradients(self) -> list[tuple[torch.Tensor, int]]:
        """The per-sample gradients that Opacus keeps in the parameters, and how often each was written to."""
        kept = tree_leaves([getattr(p, "grad_sample", None) for p in self.trained().values()])
        return [(x, x._version) for x in kept if isinstance(x, torch.Tensor)]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients that autograd has summed up in the parameters."""
        grads = {name: p.grad for name, p in self.trained().items()}
        return {name: g.detach().clone() for name, g in grads.items() if g is not None and not g.is_sparse}


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
    sources: list["Delivery"] = field(default_factory=list)
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
    """

    batches: list[PhysicalBatch]
    accumulated: int
    std: float
    summed: dict[int, torch.Tensor] = field(default_factory=dict)
    noised: dict[int, torch.Tensor] = field(default_factory=dict)


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


class LossScale:
    """Finds the constants that a loss was multiplied by right before backward."""

    def __init__(self) -> None:
        self._scaled: set[int] = set()  # ids of the last nodes of scaled losses' graphs

    def on_scaler(self, original: Any, scaler: Any, /, outputs: Any) -> Any:
        """Wraps GradScaler.scale."""
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaled is not outputs:
            self._scaled.add(id(scaled))
        return scaled

    def factor_of(self, tensors: Any) -> tuple[float, bool]:
        """Returns the product of the factors of a loss.

        Args:
            tensors: the tensors from which backward starts.

        Returns:
            The factor, and whether it is that of a GradScaler.
        """
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if not isinstance(loss, torch.Tensor):
            return 1.0, False
        scaled = id(loss) in self._scaled
        self._scaled.clear()
        factor, node = 1.0, loss.grad_fn
        while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
            constant = _constant(node)
            if not constant:
                break
            factor = factor * constant if node.name() == "MulBackward0" else factor / constant
            node = node.next_functions[0][0] or node.next_functions[-1][0]
        return factor, scaled


def _constant(node: Any) -> float | None:
    """Returns the operand of a product or quotient that has no gradient."""
    inputs = [each for each, _ in node.next_functions]
    if sum(each is not None for each in inputs) != 1:
        return None
    try:
        other = node._saved_other if inputs[0] is not None else node._saved_self
    except (AttributeError, RuntimeError):  # none, or freed
        return None
    if isinstance(other, torch.Tensor):
        return float(other) if other.numel() == 1 else None
    return float(other) if isinstance(other, (int, float)) else None


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


class Deliveries:
    """Finds out whether steps have the samples for which epsilon is computed: new batches of the private loader.

    The inputs of a call are compared with the last batches, because any code may be between loader and model. If it
    changes them, the number of batches is still known.

    Args:
        findings: receives the defects.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._samplers: list[Any] = []  # of the loaders that make_private returned
        self._is_poisson = False
        self._drawn = 0  # private batches
        self._rows = 0  # of private batches
        self._samples: dict[int, int] = {}  # that an optimizer has made steps with
        self._recent: deque[Delivery] = deque(maxlen=16)
        self._others = 0  # batches of other loaders since the last step
        self._is_matched = False  # whether inputs of a step were those of a batch
        self._accounted: list[tuple[float, float]] = []  # noise multipliers and rates since the last step

    def on_prepare(self, original: Any, engine: Any, loader: Any, /, **kwargs: Any) -> Any:
        """Wraps PrivacyEngine's preparation of a data loader."""
        prepared = original(engine, loader, **kwargs)
        self._samplers.append(getattr(prepared, "_index_sampler", None))
        if kwargs.get("poisson_sampling", True):
            self._is_poisson = True
        else:
            self._findings.note(
                "poisson_sampling=False: the accountant computes epsilon for Poisson sampling, which this loader does "
                "not do.",
                "poisson",
            )
        return prepared

    def on_accounted(self, original: Any, accountant: Any, /, **kwargs: float) -> Any:
        """Wraps the step of an accountant."""
        self._accounted.append((kwargs["noise_multiplier"], kwargs["sample_rate"]))
        return original(accountant, **kwargs)

    def on_next(self, original: Any, iterator: Any, /) -> Any:
        """Wraps `__next__` of the iterators of data loaders. The batch is kept, not copied."""
        data = original(iterator)
        sampler = self._private_sampler(iterator._index_sampler)
        is_private = sampler is not None
        self._others = 0 if is_private and not self._drawn else self._others + (not is_private)
        self._drawn += is_private
        # torch's trees know dicts, but not other mappings, such as those of transformers.
        leaves = tree_leaves(dict(data) if isinstance(data, Mapping) else data)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self._rows += is_private * next((len(x) for x in tensors if x.dim()), _MANY)
        self._recent.append(Delivery(is_private, getattr(sampler, "sample_rate", 0.0), tensors))
        return data

    def sources(self, inputs: Any) -> list[Delivery]:
        """Returns the batches that a call's inputs are equal to, or are rows of."""
        mine = [x.detach().cpu() for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()]
        mine = [x for x in mine if len(x) and bool((x != x.flatten()[0]).any())]  # all masks of ones are equal
        return [each for each in self._recent if any(_is_part(x, y) for y in each.tensors for x in mine)]

    def check(self, steps: int, calls: list["Call"], optimizer: Any, samples: int) -> None:
        """Checks a step, which the accountant has counted.

        Args:
            steps: the number of steps of this optimizer, with this one.
            calls: the calls of the step.
            optimizer: the private optimizer.
            samples: how many samples were clipped.
        """
        self._check_accountant(float(optimizer.noise_multiplier), calls)
        self._samples[id(optimizer)] = clipped = self._samples.get(id(optimizer), 0) + samples
        if self._drawn and clipped > self._rows:
            self._findings.not_checked(
                "whether each sample is clipped once",
                f"the model got {clipped} samples where the loader had drawn {self._rows}: where several come from one "
                "(augmented views, windows, tokens), each is clipped by itself, and that one contributes up to the "
                "bound several times.",
                "copies",
            )
        others, self._others = self._others, 0
        found = [call.sources for call in calls if call.sources]
        unknown = ""
        if not self._samplers and not self._drawn:
            unknown = "the script does not call make_private."
        elif not self._drawn or any(not any(each.is_private for each in sources) for sources in found):
            if self._samplers and not self._is_poisson:
                unknown = "the script trains on others than those of its loader."
            else:
                self._findings.defect(
                    "The script trains on batches that do not come from the loader that make_private "
                    "returned: epsilon does not hold for them. Train on new batches of the loader that "
                    "make_private returned.",
                    "source",
                )
        elif self._drawn < steps and self._is_matched and not found:
            unknown = "there are more steps than batches, and some are on inputs that are in no batch."
        elif self._drawn < steps or any(
            all(id(optimizer) in each.used for each in sources if each.is_private) for sources in found
        ):
            self._findings.defect(
                "The script makes several steps with the same batch, but epsilon is that of a new one in each step. "
                "Train on new batches of the loader that make_private returned.",
                "source",
            )
        elif others and len(found) < len(calls):
            unknown = "the script draws from other loaders, too, and changes the batches before the model gets them."
        if unknown:
            self._findings.not_checked("whether the batches are drawn as the accountant assumes", unknown, "source")
        self._is_matched = self._is_matched or bool(found)
        for sources in found:
            for each in sources:
                each.used.add(id(optimizer))

    def _check_accountant(self, noise: float, calls: list["Call"]) -> None:
        accounted, self._accounted = self._accounted, []
        if not accounted:
            if self._samplers:
                self._findings.not_checked("epsilon", "no accountant of Opacus has counted the step.", "epsilon")
            return
        counted, rate = max(each for each, _ in accounted), max(each for _, each in accounted)
        if noise < counted * (1 - 1e-6):
            self._findings.defect(
                f"The accountant counts a noise_multiplier of {counted:.4g}, but the optimizer's is {noise:.4g}: "
                "epsilon is too small.",
                "multiplier",
            )
        drawn = max((min(each.rate for each in call.sources) for call in calls if call.sources), default=0.0)
        if drawn > rate * (1 + 1e-6):
            self._findings.defect(
                f"Samples are drawn with a probability of {drawn:.4g}, but the accountant counts {rate:.4g}: epsilon "
                "is too small. Call make_private with the loader of the data that are trained on.",
                "rate of samples",
            )

    def _private_sampler(self, sampler: Any) -> Any:
        """Follows samplers of samplers, as those of BatchMemoryManager and Accelerate."""
        while sampler is not None:
            if isinstance(sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)) or any(
                sampler is each for each in self._samplers
            ):
                return sampler
            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        return None


def _is_part(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns whether a tensor has consecutive rows of another one, or is a view of it."""
    if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        return True
    if not whole.dim() or len(whole) < len(part) or whole.numel() * len(part) != part.numel() * len(whole):
        return False
    rows, all_rows = part.reshape(len(part), -1), whole.detach().to("cpu", part.dtype).reshape(len(whole), -1)
    starts = (all_rows == rows[0]).all(1).nonzero().flatten().tolist()
    return any(torch.equal(all_rows[start : start + len(rows)], rows) for start in starts)
