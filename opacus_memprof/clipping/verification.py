# SPDX-License-Identifier: Apache-2.0
"""Compares the clipping of any grad_sample_mode with clipping by hand, one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.utils import prepare_module
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from opacus_memprof.clipping.module import GradSampleModuleFlashClip
from opacus_memprof.clipping.optimizer import DPOptimizerFlashClip
from opacus_memprof.errors import MemprofError

Losses = Callable[[nn.Module, Any], torch.Tensor]
_MODES = ("flash_clip", "hooks", "functorch", "ew", "ghost")
_STABILITY = 1e-6  # as in Opacus


@dataclass(frozen=True)
class Verification:
    """How far a mode's clipping is from clipping by hand.

    Attributes:
        mode: the grad_sample_mode.
        norms: per-sample gradient norms, found by hand.
        norm_error: the largest relative error of a sample's norm.
        errors: the largest error of each parameter's clipped gradient, relative to its largest element.
        tolerance: what counts as exact: 1e-8, or 1e-4 where the model computes in float32.
    """

    mode: str
    norms: list[float]
    norm_error: float
    errors: dict[str, float]
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether all errors are within the tolerance."""
        return max([self.norm_error, *self.errors.values()]) <= self.tolerance

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name])
        if self.exact:
            return (
                f"grad_sample_mode={self.mode!r} clips this model exactly: {len(self.norms)} samples, "
                f"{len(self.errors)} parameters, largest relative error {max(self.norm_error, self.errors[worst]):.1e}."
            )
        wrong = sum(error > self.tolerance for error in self.errors.values())
        return (
            f"grad_sample_mode={self.mode!r} does not clip this model exactly: the norms are off by up to "
            f"{self.norm_error:.1%}, the clipped gradients of {wrong} of {len(self.errors)} parameters by up to "
            f"{self.errors[worst]:.1%} (of {worst})."
        )


def verify(
    model: nn.Module, batch: Any, mode: str = "flash_clip", *, losses: Losses | None = None, max_samples: int = 4
) -> Verification:
    """Compares a mode's per-sample norms and clipped gradients with those computed by hand, one sample at a time.

    Works on copies of the model, in float64 where it runs in that, and without dropout, whose random numbers would
    differ. The model, its gradients and the random number generators are left as they were.

    Args:
        model: the model, not made private.
        batch: what the model is called with, samples first: a tensor, a sequence of positional arguments, or a mapping
            of keyword arguments.
        mode: "flash_clip", "hooks", "functorch", "ew" or "ghost".
        losses: the losses of the samples, [B], of a model and a batch. Default: a weighted sum of all outputs and of
            their squares.
        max_samples: how many samples of the batch are used.

    Returns:
        The errors. Print it for a sentence.

    Raises:
        MemprofError: the mode is unknown, the model has been made private, or no gradient can be computed.
    """
    if mode not in _MODES:
        raise MemprofError(f"mode is {mode!r}; verify knows {', '.join(_MODES)}.")
    if isinstance(model, AbstractGradSampleModule):
        raise MemprofError("the model has been made private; verify the model before make_private.")
    batch = _first_samples(batch, max_samples)
    losses = losses or _losses_of_outputs
    devices = list({p.device for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), _NoDropout():
        try:
            prepared, converted = _copy_of(model, torch.float64), _cast(batch, torch.float64)
            norms, _ = _by_hand(prepared, converted, losses, 1.0)
            tolerance = 1e-8
        except RuntimeError:  # some operations know no float64
            prepared, converted, tolerance = _copy_of(model, torch.float32), _cast(batch, torch.float32), 1e-4
            norms, _ = _by_hand(prepared, converted, losses, 1.0)
        bound = sorted(norms)[len(norms) // 2]  # so that some samples are clipped
        if not bound > 0:
            raise MemprofError(
                "the gradients of these samples are zero or not finite: give losses that depend on them."
            )
        _, expected = _by_hand(prepared, converted, losses, bound)
        found_norms, found = _by_mode(mode, prepared, converted, losses, bound)
    return Verification(
        mode,
        norms,
        max(abs(a - b) / max(b, 1e-9 * bound) for a, b in zip(found_norms, norms, strict=True)),
        _relative_errors(found, expected),
        tolerance,
    )


def _relative_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    smallest = 1e-6 * max(float(each.abs().max()) for each in expected.values())
    return {
        name: float((found[name] - each).abs().max()) / max(float(each.abs().max()), smallest)
        for name, each in expected.items()
    }


def _trained(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _by_hand(model: nn.Module, batch: Any, losses: Losses, bound: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms, and the sums of clipped gradients by parameter."""
    trained = _trained(model)
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    norms = []
    for n in range(_size(batch)):
        model.zero_grad()
        sample = tree_map(lambda x, n=n: x[n : n + 1] if _has_samples(x) else x, batch)
        torch.autograd.backward(losses(model, sample).sum())
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        norms.append(sum(float(g.square().sum()) for g in gradients.values()) ** 0.5)
        for name, g in gradients.items():
            total[name] += min(1.0, bound / (norms[-1] + _STABILITY)) * g
    model.zero_grad()
    return norms, total


def _by_mode(
    mode: str, model: nn.Module, batch: Any, losses: Losses, bound: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by a mode, on a copy of the model."""
    copied = copy.deepcopy(model)
    trained = _trained(copied)
    if mode == "flash_clip":
        flash = GradSampleModuleFlashClip(copied, loss_reduction="sum", max_grad_norm=bound)
        optimizer = DPOptimizerFlashClip(
            torch.optim.SGD(list(trained.values()), lr=1.0),
            module=flash,
            noise_multiplier=0.0,
            max_grad_norm=bound,
            expected_batch_size=1,
            loss_reduction="sum",
        )
        torch.autograd.backward(losses(flash, batch).sum())
        optimizer.pre_step()
        return flash.per_sample_gradient_norms.tolist(), {name: p.grad for name, p in trained.items()}
    options = {"max_grad_norm": bound} if mode == "ghost" else {}
    module: Any = prepare_module(copied, mode, batch_first=True, loss_reduction="sum", **options)
    each = losses(module, batch)
    if mode == "ghost":
        torch.autograd.backward(each.sum(), retain_graph=True)
        norms = module.get_norm_sample()
        factors = module.get_clipping_coef()
        copied.zero_grad()
        module.disable_hooks()
        torch.autograd.backward((each * factors).sum())
        return norms.tolist(), {name: p.grad for name, p in trained.items()}
    torch.autograd.backward(each.sum())
    stacks = {name: p.grad_sample for name, p in trained.items()}
    norms = torch.stack([stack.flatten(1).square().sum(1) for stack in stacks.values()]).sum(0).sqrt()
    factors = (bound / (norms + _STABILITY)).clamp(max=1.0)
    return norms.tolist(), {name: torch.einsum("n,n...->...", factors, stack) for name, stack in stacks.items()}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, Sequence) else model(batch)


def _losses_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    leaves = tree_flatten(_call(model, batch))[0]
    outputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad and x.dim()]
    if not outputs:
        raise MemprofError("no output of the model has both gradients and samples; give verify the losses.")
    total = torch.zeros(_size(batch), dtype=outputs[0].dtype, device=outputs[0].device)
    for x in outputs:
        if len(x) == len(total):
            flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
            weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=x.dtype, device=x.device)
            total = total + ((flat * weights).mean(1) + flat.square().mean(1)).to(total)
    return total


def _copy_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    copied = copy.deepcopy(model).to(dtype).train()
    copied.zero_grad()
    return copied


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, batch)


def _has_samples(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _size(batch: Any) -> int:
    return next((len(x) for x in tree_flatten(batch)[0] if _has_samples(x)), 0)


def _first_samples(batch: Any, count: int) -> Any:
    if not _size(batch):
        raise MemprofError("the batch has no sample; give verify tensors whose first dimension is the batch.")
    return tree_map(lambda x: x[:count] if _has_samples(x) else x, batch)


class _NoDropout(TorchFunctionMode):
    """Makes dropout the identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
