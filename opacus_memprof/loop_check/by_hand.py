# SPDX-License-Identifier: Apache-2.0
"""A logical step by hand: per-sample gradients of recorded batches, clipped sums, and the noise's standard deviation.

Runs the plain model again, with one backward for each sample.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from opacus_memprof.loop_check.records import (
    Call,
    Findings,
    LogicalStep,
    NotCheckedError,
    PhysicalBatch,
    RandomState,
    first_line,
    listed,
)

Gradients = dict[str, torch.Tensor]
_STABILITY = 1e-6  # in the clip factor of Opacus
_LARGEST_CHANGE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of outputs, relative; other dtypes: 2e-2
_SIGMAS = 6.0  # of the measured standard deviation
_FEWEST = 64  # elements of a parameter whose standard deviation is compared separately


@dataclass
class Batch:
    """A physical batch clipped by hand.

    Attributes:
        norms: the gradient norms of the samples.
        clipped: the number of samples that were clipped.
        total: the sum of the clipped gradients, in float64.
        gradient: the loss's gradient: the sum of the gradients without clipping, or their mean.
    """

    norms: list[float] = field(default_factory=list)
    clipped: int = 0
    total: Gradients = field(default_factory=dict)
    gradient: Gradients = field(default_factory=dict)


def clip_by_hand(batch: PhysicalBatch, bound: float | list[float], names: list[str], automatic: bool = False) -> Batch:
    """Sums the clipped gradients of the samples, one sample at a time.

    Args:
        batch: the recorded batch.
        bound: the bound of a sample's gradient, or one for each of the parameters.
        names: the parameters whose gradients are clipped.
        automatic: whether gradients are normalized to the bound instead (clipping="automatic").

    Raises:
        NotCheckedError: the batch cannot be computed again.
    """
    result = Batch()
    weight = 1.0
    if batch.calls[0].root.hooks.loss_reduction == "mean":
        weight = 1 / max(1, size_of(batch.calls[0]))
    for every in per_sample_gradients(batch):
        for name, g in every.items():
            share = weight * g
            result.gradient[name] = result.gradient[name] + share if name in result.gradient else share
        gradients = {name: every[name] for name in names if name in every}
        squares = {name: float(g.square().sum()) for name, g in gradients.items()}
        norm = math.sqrt(sum(squares.values()))
        result.norms.append(norm)
        if isinstance(bound, list):
            limits = dict(zip(names, bound, strict=True))
            factors = {name: min(1.0, limits[name] / (math.sqrt(squares[name]) + _STABILITY)) for name in gradients}
        elif automatic:
            factors = dict.fromkeys(gradients, bound / (norm + 0.01))
        else:
            factors = dict.fromkeys(gradients, min(1.0, bound / (norm + _STABILITY)))
        result.clipped += any(factor < 1 for factor in factors.values())
        for name, g in gradients.items():
            g *= factors[name]
            result.total[name] = result.total[name] + g if name in result.total else g
    return result


def per_sample_gradients(batch: PhysicalBatch) -> Iterator[Gradients]:
    """Yields the gradient of each sample, in float64.

    Runs the whole batch again with the recorded random numbers, so that dropout is the same. Backward starts from one
    sample's rows at a time. A loss that the model itself computes has no rows; in this case each sample runs alone.

    Raises:
        NotCheckedError: the batch cannot be computed again.
    """
    sizes = {size_of(call) for call in batch.calls}
    if len(sizes) > 1:
        raise NotCheckedError(
            f"one backward goes through calls of the model with {', '.join(map(str, sorted(sizes)))} samples; which of "
            "them belong together is unknown."
        )
    size = sizes.pop()
    if size == 0:
        return
    scale = float(size) if batch.calls[0].root.hooks.loss_reduction == "mean" else 1.0
    if any(cotangent.dim() == 0 for call in batch.calls for cotangent in call.cotangents.values()):
        yield from _one_at_a_time(batch, size)
        return
    outputs: list[torch.Tensor] = []
    cotangents: list[torch.Tensor] = []
    for call in batch.calls:
        found = run_again(call)
        for index, cotangent in call.cotangents.items():
            if len(cotangent) % size:
                raise NotCheckedError(
                    f"an output has the shape {list(cotangent.shape)} for {size} samples, whose rows are unknown; "
                    "return outputs whose first dimension is the batch."
                )
            outputs.append(found[index])
            cotangents.append(cotangent)
    for n in range(size):
        yield _backward(batch, outputs, [_rows_of(c, n, size) * scale for c in cotangents])


def _rows_of(cotangent: torch.Tensor, n: int, size: int) -> torch.Tensor:
    """Returns the cotangent with zeros for all other samples."""
    rows = len(cotangent) // size
    alone = torch.zeros_like(cotangent)
    alone[n * rows : (n + 1) * rows] = cotangent[n * rows : (n + 1) * rows]
    return alone


def _one_at_a_time(batch: PhysicalBatch, size: int) -> Iterator[Gradients]:
    call = batch.calls[0]
    if len(batch.calls) > 1 or any(cotangent.dim() for cotangent in call.cotangents.values()):
        raise NotCheckedError("the loss combines losses that the model returns with other outputs or calls.")
    if draws_random_numbers(call):
        raise NotCheckedError(
            "the model returns one loss for the batch and draws random numbers, which would differ for one sample "
            "alone; set dropout to 0 for the check, or return outputs and compute the loss outside."
        )
    for n in range(size):
        found = run_again(call, functools.partial(only, n, size))
        indices = list(call.cotangents)
        yield _backward(batch, [found[i] for i in indices], [call.cotangents[i] for i in indices])


def _backward(batch: PhysicalBatch, outputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> Gradients:
    plain = batch.calls[0].root.plain
    assert plain is not None  # it was run
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        outputs, list(trained.values()), cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return {name: g.detach().double() for name, g in zip(trained, gradients, strict=True)}


def run_again(call: Call, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
    """Runs a recorded call on the plain model, with its random numbers and the present parameters.

    Args:
        call: the call.
        change: applied to each tensor among the inputs.

    Returns:
        The outputs of the call, by index.

    Raises:
        NotCheckedError: the model cannot be run again, or gives other outputs for the same inputs.
    """
    args, kwargs = call.args, call.kwargs
    if change is not None:
        args, kwargs = tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    plain = _prepared(call)
    call.random.restore()
    try:
        with torch.enable_grad(), call.autocast():
            leaves = tree_flatten(plain(*args, **kwargs))[0]
    except Exception as error:  # a model may raise anything
        raise NotCheckedError(f"the model cannot be run again on recorded inputs ({first_line(error)}).") from error
    if any(i >= len(leaves) for i in call.outputs):
        raise NotCheckedError("the model returns other outputs when it is run again on the same inputs.")
    found = {i: leaves[i] for i in call.outputs}
    if change is None and any(not is_close(found[i].detach(), x) for i, x in call.outputs.items()):
        raise NotCheckedError(
            "the model gives other outputs when it is run again on the same inputs: its parameters were changed "
            "between forward and step, hooks were added after it was made private, or it keeps a state of its own."
        )
    return found


def _prepared(call: Call) -> nn.Module:
    """Returns the plain copy in the state that the model had at the call."""
    root = call.root
    if root.plain is None:
        raise NotCheckedError(f"the model cannot be copied ({root.why_no_copy}).")
    live, plain = dict(root.model.named_parameters()), dict(root.plain.named_parameters())
    if live.keys() != plain.keys() or len(call.training) != len(list(root.plain.modules())):
        raise NotCheckedError("modules or parameters were added or removed after the model was made private.")
    for name, parameter in plain.items():
        parameter.data = live[name].data
        parameter.requires_grad_(live[name].requires_grad)
    for module, training in zip(root.plain.modules(), call.training, strict=True):
        module.training = training
    for name, value in call.buffers.items():
        path, _, last = name.rpartition(".")
        root.plain.get_submodule(path)._buffers[last] = value.clone()
    return root.plain


def draws_random_numbers(call: Call) -> bool:
    """Returns whether the model draws random numbers in this call."""
    run_again(call)
    return RandomState().differs(call.random)


def mixing_module(call: Call) -> tuple[str, float] | None:
    """Returns the module in which one sample changes the output of another, and the relative size of the change.

    For each bit of a sample's index, samples without that bit keep their inputs and the others get inputs of their
    neighbours, then the reverse. Some bit separates each pair of samples. Random numbers are the same.

    Returns:
        The name of the first module with such an output, or "" if only the model's outputs change; None if the samples
        are processed separately.

    Raises:
        NotCheckedError: the model cannot be run on such inputs.
    """
    size = size_of(call)
    if size < 2 or any(x.dim() == 0 or len(x) % size for x in call.outputs.values()):
        return None
    indices = torch.arange(size)
    for bit in range((size - 1).bit_length()):
        for value in (0, 1):
            kept = (indices >> bit) % 2 == value
            found = run_again(call, functools.partial(_replaced, kept, size))
            worst = max(_change(found[i].detach(), x, kept) for i, x in call.outputs.items())
            if worst:
                return _first_changed(call, kept, size), worst
    return None


def only(n: int, size: int, x: torch.Tensor) -> torch.Tensor:
    return x[n : n + 1] if has_rows(x, size) else x


def _replaced(kept: torch.Tensor, size: int, x: torch.Tensor) -> torch.Tensor:
    if not has_rows(x, size):
        return x
    return torch.where(kept.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, x.roll(1, 0))


def _change(found: torch.Tensor, expected: torch.Tensor, kept: torch.Tensor) -> float:
    """Returns the largest relative difference of the kept samples' rows; 0 within rounding."""
    if found.shape != expected.shape or found.dim() == 0 or len(found) % len(kept):
        return 0.0
    rows = kept.to(found.device).repeat_interleave(len(found) // len(kept))
    a, b = found[rows].double(), expected[rows].double()
    scale = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    change = float((a - b).abs().nan_to_num(0, 0, 0).max()) / scale if scale else 0.0
    return change if change > _LARGEST_CHANGE.get(found.dtype, 2e-2) else 0.0


def _first_changed(call: Call, kept: torch.Tensor, size: int) -> str:
    assert call.root.plain is not None
    outputs: list[dict[str, torch.Tensor]] = [{}, {}]
    for seen, change in zip(outputs, (None, functools.partial(_replaced, kept, size)), strict=True):

        def keep(name: str, seen: dict[str, torch.Tensor]) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if name and isinstance(output, torch.Tensor) and name not in seen:
                    seen[name] = output.detach().clone()

            return hook

        handles = [m.register_forward_hook(keep(n, seen)) for n, m in call.root.plain.named_modules()]
        try:
            run_again(call, change)
        finally:
            for handle in handles:
                handle.remove()
    pairs = ((name, x, outputs[1].get(name)) for name, x in outputs[0].items())
    return next((name for name, x, other in pairs if other is not None and _change(other, x, kept)), "")


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two results of the same computation agree within rounding."""
    if found.shape != expected.shape:
        return False
    tolerance = _LARGEST_CHANGE.get(expected.dtype, 2e-2)
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def has_rows(x: torch.Tensor, size: int) -> bool:
    """Returns whether the first dimension of a tensor is the batch."""
    return x.dim() > 0 and len(x) == size


def size_of(call: Call) -> int:
    """Returns the number of samples: the length of the first tensor among the inputs.

    Raises:
        NotCheckedError: no input is a tensor.
    """
    for leaf in tree_flatten((call.args, call.kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise NotCheckedError("no tensor among the model's inputs has a batch dimension.")


def check_noise(
    step: LogicalStep, trained: dict[str, nn.Parameter], findings: Findings
) -> tuple[float | None, torch.Tensor]:
    """Compares the noise with the requested standard deviation, in each parameter and over all.

    Args:
        step: the recorded sums with and without noise.
        trained: the parameters.
        findings: receives the defects and notes.

    Returns:
        The standard deviation relative to the requested one, None if unknown; and a part of the noise.
    """
    if step.std == 0:
        findings.not_checked("noise", "noise_multiplier is 0, so that the training is not private.")
        return None, torch.empty(0)
    rests = {}
    for name, p in trained.items():
        noised, summed = step.noised.get(id(p)), step.summed.get(id(p))
        if noised is not None and summed is not None:
            rests[name] = noised.double() - summed.double().reshape(noised.shape)
    if not rests:
        findings.not_checked("noise", "the clipped sum without it is not known.")
        return None, torch.empty(0)
    without = [name for name, rest in rests.items() if not bool(rest.any())]
    if without:
        findings.defect(
            f"No noise is added to {listed(without)}, although the optimizer asks for a standard deviation of "
            f"{step.std:.4g}.",
            "no noise",
        )
    off = {}
    for name, rest in rests.items():
        total = step.noised[id(trained[name])]
        rounding = torch.finfo(total.dtype).eps * float(total.double().square().mean().sqrt()) / step.std
        ratio = math.sqrt(float(rest.square().mean())) / step.std
        allowed = _SIGMAS / math.sqrt(2 * rest.numel()) + rounding
        if rest.numel() >= _FEWEST and name not in without and abs(ratio - 1) > allowed:
            off[name] = ratio
    count = sum(rest.numel() for rest in rests.values())
    measured = math.sqrt(sum(float(rest.square().sum()) for rest in rests.values()) / count) / step.std
    where = ""
    if off:
        worst = max(off, key=lambda name: abs(off[name] - 1))
        more = f", and {len(off) - 1} more parameters are off" if len(off) > 1 else ""
        where = f"in {worst} it is {off[worst]:.3g} times that{more}."
    elif not without and abs(measured - 1) > _SIGMAS / math.sqrt(2 * count) + 1e-2:
        where = f"over all parameters it is {measured:.3g} times that."
    if where:
        findings.defect(
            f"The noise does not have the requested standard deviation, {step.std:.4g} (noise_multiplier times "
            f"bound): {where}",
            "noise",
        )
    largest = max(rests, key=lambda name: rests[name].numel())
    return measured, rests[largest].flatten()[:10_000] / step.std
