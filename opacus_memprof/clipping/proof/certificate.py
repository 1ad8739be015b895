# SPDX-License-Identifier: Apache-2.0
"""Records what has been proved in a run: the content of privacy_check.json, as plain data.

profiles.privacy_check defines the structure of the file. No per-sample norm is recorded. Data that depends on the
values of samples is stored separately, under `not_private`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import opacus
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

import opacus_memprof
from opacus_memprof.clipping.arguments import Check
from opacus_memprof.clipping.layers import GenericLayer, Layer

FORMAT = 1
Proved = Literal["mixing", "sums", "explained", "clipped_sum"]

NOTE = (
    "These values depend on the data and are not differentially private: remove them before the file is published. "
    "Norms of single samples are never recorded."
)
_EXACT_SIZES = 16
"""Batches of up to so many samples are recorded with their exact size; larger ones with the powers of two around it."""
_MOST_REASONS = 100


@dataclass
class Span:
    """Consecutive forwards, or steps, that were checked in the same way.

    Attributes:
        first, last: their numbers; the first forward is 1.
        share: the fraction of the batch that was checked.
    """

    first: int
    last: int
    share: float

    def to_data(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last, "share": self.share}


class Checks:
    """The kinds of checks, and the forwards or steps in which they ran."""

    def __init__(self) -> None:
        self._spans: dict[Proved, list[Span]] = {}

    def add(self, what: Proved, number: int, share: float = 1.0) -> None:
        """Adds the check of a forward or a step. `number` is its number, and `share` the fraction of the batch."""
        spans = self._spans.setdefault(what, [])
        last = spans[-1] if spans else None
        if last is None or share != last.share or number not in (last.last, last.last + 1):
            spans.append(Span(number, number, share))
        else:
            last.last = number

    def to_data(self) -> dict[str, Any]:
        return {what: [span.to_data() for span in spans] for what, spans in self._spans.items()}


@dataclass(frozen=True)
class Description:
    """A description of a situation for people.

    Attributes:
        module: the name of the module that is called; "" for the model.
        arguments: the kinds of its arguments, such as "Tensor[B, n] float32".
        autocast: the dtype of autocast; None without it.
        evaluating: names of the modules that are in evaluation mode.
        trained_parameters, trained_elements: the number of trained tensors, and of their elements.
        tapped_layers: the number of layers whose inputs and output gradients are used.
        repeated: the modules whose forwards are repeated: name, way, and the parameters' names in them.
    """

    module: str
    arguments: str
    autocast: str | None
    evaluating: tuple[str, ...]
    trained_parameters: int
    trained_elements: int
    tapped_layers: int
    repeated: tuple[tuple[str, str, tuple[str, ...]], ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        entry: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        layers: Sequence[Layer],
        trained: Iterable[nn.Parameter],
    ) -> Description:
        """Describes a call.

        Args:
            model: the model.
            entry: the module that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            batch: the number of samples.
            layers: the layers of the model.
            trained: the trained parameters.
        """
        names = {module: name for name, module in model.named_modules()}
        repeated = [
            (layer.name, str(layer.way), tuple(layer.names)) for layer in layers if isinstance(layer, GenericLayer)
        ]
        sizes = [parameter.numel() for parameter in trained]
        return cls(
            module=names.get(entry, ""),
            arguments=describe_arguments(args, kwargs, batch),
            autocast=_autocast(),
            evaluating=tuple(name for module, name in names.items() if not module.training),
            trained_parameters=len(sizes),
            trained_elements=sum(sizes),
            tapped_layers=len(layers) - len(repeated),
            repeated=tuple(repeated),
        )


@dataclass
class SituationRecord:
    """The properties that were proved in a situation.

    Attributes:
        description: describes the situation.
        forwards: the number of forwards so far, except those of empty batches.
        orders: the number of orders of layer calls that are proved.
        sizes: the smallest and the largest batch; above 16 rounded to the powers of two around it.
        checks: the checks, and the forwards in which they ran.
    """

    description: Description
    forwards: int = 0
    orders: int = 1
    sizes: tuple[int, int] | None = None
    checks: Checks = field(default_factory=Checks)

    def begin_forward(self, batch: int) -> None:
        """Counts a forward with this number of samples. Later calls of `note` refer to it."""
        self.forwards += 1
        low, high = _rounded(batch)
        if self.sizes is None:
            self.sizes = low, high
        elif low < self.sizes[0] or high > self.sizes[1]:
            self.sizes = min(low, self.sizes[0]), max(high, self.sizes[1])

    def note(self, what: Proved, share: float = 1.0, forward: int | None = None) -> None:
        """Records a check that has succeeded.

        Args:
            what: the kind of check.
            share: the fraction of the batch that was checked.
            forward: the number of the forward; the current one by default.
        """
        self.checks.add(what, self.forwards if forward is None else forward, share)

    def to_data(self) -> dict[str, Any]:
        own = self.description
        return {
            "module": own.module,
            "arguments": own.arguments,
            "autocast": own.autocast,
            "evaluating": list(own.evaluating),
            "trained_parameters": own.trained_parameters,
            "trained_elements": own.trained_elements,
            "tapped_layers": own.tapped_layers,
            "repeated": [{"module": m, "way": way, "parameters": list(names)} for m, way, names in own.repeated],
            "batch_sizes": list(self.sizes or ()),
            "orders": self.orders,
            "forwards": self.forwards,
            "checks": self.checks.to_data(),
        }


class Certificate:
    """Records what was proved about one model that make_private has returned.

    Args:
        mode: the grad_sample_mode.
        model: the model.
        check: which forwards, or steps, are checked.
        nonfinite: flash_clip_nonfinite; None for other modes.
        counts_steps: whether steps are counted. Opacus' modes with check="off" are not followed.
    """

    def __init__(
        self, mode: str, model: nn.Module, check: Check, nonfinite: str | None = None, counts_steps: bool = True
    ) -> None:
        self.mode, self.check, self.nonfinite, self.counts_steps = mode, check, nonfinite, counts_steps
        self.model = type(model).__name__
        self.device = _device_name(model)
        is_rank = dist.is_available() and dist.is_initialized()  # it may have left its group later
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if is_rank else (0, 1)
        self.situations: list[SituationRecord] = []
        self.checks = Checks()
        self.steps = self.refused = self.dropped = 0
        self._clipping, self._loss_reduction, self._bounds = "flat", "mean", list[float]()
        self._bound: tuple[float, float] | None = None
        self._noise: tuple[float, float] | None = None
        self._largest_sum: float | None = None
        self._refusals: dict[str, dict[str, Any]] = {}

    def describe_clipping(
        self, clipping: str, bounds: Sequence[float], bound: float, noise_multiplier: float, loss_reduction: str
    ) -> None:
        """Records how gradients are clipped.

        Args:
            clipping: "flat", "per_layer", "adaptive" or "automatic".
            bounds: the bounds of the parameters, for "per_layer".
            bound: the bound of a sample's gradient.
            noise_multiplier: the standard deviation of the noise, in units of `bound`.
            loss_reduction: "mean" or "sum".
        """
        self._clipping, self._bounds, self._loss_reduction = clipping, [float(b) for b in bounds], loss_reduction
        self._bound, self._noise = (float(bound),) * 2, (float(noise_multiplier),) * 2

    def situation(self, description: Description) -> SituationRecord:
        """Returns the record of a proved situation. A situation that is proved again keeps its record."""
        for known in self.situations:
            if known.description == description:
                return known
        self.situations.append(SituationRecord(description))
        return self.situations[-1]

    def count_step(
        self, bound: float, noise_multiplier: float, largest_sum: float | None = None, dropped: int = 0
    ) -> None:
        """Counts a completed step.

        Args:
            bound: the bound to which the step's noise is proportional.
            noise_multiplier: the noise multiplier of the step.
            largest_sum: the norm of its clipped sum, relative to the limit for its samples.
            dropped: the number of samples that were dropped in all steps.
        """
        self.steps += 1
        self._bound, self._noise = _widened(self._bound, bound), _widened(self._noise, noise_multiplier)
        if largest_sum is not None:
            self._largest_sum = max(largest_sum, self._largest_sum or 0.0)
        self.dropped = dropped

    def refuse(self, error: BaseException) -> None:
        """Records the error of a forward or a step that was refused."""
        self.refused += 1
        reason = str(error)
        known = self._refusals.get(reason)
        if known is not None:
            known["times"] += 1
        elif len(self._refusals) < _MOST_REASONS:
            self._refusals[reason] = {"step": self.steps + 1, "reason": reason, "times": 1}

    def to_data(self) -> dict[str, Any]:
        """Returns the record as plain data; see profiles.privacy_check.ModelCheck."""
        return {
            "model": self.model,
            "device": self.device,
            "mode": self.mode,
            "clipping": self._clipping,
            "max_grad_norm": list(self._bound or ()),
            "bounds": self._bounds,
            "noise_multiplier": list(self._noise or ()),
            "loss_reduction": self._loss_reduction,
            "check": self.check,
            "nonfinite": self.nonfinite,
            "in_every_step": self._in_every_step(),
            "situations": [each.to_data() for each in self.situations],
            "checked_steps": self.checks.to_data(),
            "steps": self.steps if self.counts_steps else None,
            "not_private": {
                "note": NOTE,
                "largest_sum": self._largest_sum,
                "dropped_samples": self.dropped,
                "refused": self.refused,
                "refusals": [dict(each) for each in self._refusals.values()],
            },
        }

    def _in_every_step(self) -> list[str]:
        if self.mode != "flash_clip":
            return []
        return ["finite_norms", "norm_of_clipped_sum", *(["situation"] if self.check != "off" else [])]


class EngineRecord:
    """Records what was proved about the models that one engine made private. Holds neither the models nor their data.

    Attributes:
        models: the certificates, in the order of make_private.
        earlier: the contents of privacy_check.json that earlier processes of the same training have written.
    """

    def __init__(self) -> None:
        self.models: list[Certificate] = []
        self.earlier: list[dict[str, Any]] = []

    def to_data(self) -> dict[str, Any]:
        """Returns the content of privacy_check.json. At least one model must have been recorded."""
        return {
            "format": FORMAT,
            "versions": {
                "opacus_memprof": opacus_memprof.__version__,
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda,
                "opacus": opacus.__version__,
                "python": platform.python_version(),
            },
            "rank": self.models[0].rank,
            "world_size": self.models[0].world_size,
            "models": [each.to_data() for each in self.models],
            "earlier": self.earlier,
        }


def describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> str:
    """Describes the kinds of arguments in a line, such as "Tensor[B, n] float32, mask=Tensor[B, 1] bool".

    B is the number of samples, and n any other size.
    """
    leaves, _ = tree_flatten_with_path((args, kwargs))
    return ", ".join(f"{_prefix(path)}{_describe(leaf, batch)}" for path, leaf in leaves)


def _prefix(path: tuple[Any, ...]) -> str:
    """Returns the name of a keyword argument, with "="; an empty string for a positional argument."""
    is_named = getattr(path[0], "idx", 0) == 1
    return f"{getattr(path[1], 'key', path[1])}=" if is_named and len(path) > 1 else ""


def _describe(leaf: Any, batch: int) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if leaf is None or isinstance(leaf, bool) else type(leaf).__name__
    sizes = ", ".join("B" if size == batch else "1" if size == 1 else "n" for size in leaf.shape)
    return f"Tensor[{sizes}] {str(leaf.dtype).removeprefix('torch.')}"


def _autocast() -> str | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def _device_name(model: nn.Module) -> str:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _rounded(batch: int) -> tuple[int, int]:
    if batch <= _EXACT_SIZES:
        return batch, batch
    power = 1 << (batch.bit_length() - 1)
    return max(power, _EXACT_SIZES + 1), 2 * power - 1


def _widened(known: tuple[float, float] | None, value: float) -> tuple[float, float]:
    low, high = known or (value, value)
    return min(low, float(value)), max(high, float(value))
