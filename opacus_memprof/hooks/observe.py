# SPDX-License-Identifier: Apache-2.0
"""Notices what findings need and the event file cannot know: shapes of layers, captures that pile up, gradients that
are about to be replaced. Each look costs a fraction of the Opacus call that it goes with."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from opacus.optimizers import DPOptimizerFastGradientClipping
from torch import Tensor, nn

from opacus_memprof import _native, observations

_HOOKED = ("activation_hooks_shared", "activation_hooks_opacus_only")
_BEGINNINGS = 3  # forwards in a row that must begin with captures outstanding; fewer may share one backward

_beginnings: "deque[dict[int, int]]" = deque(maxlen=_BEGINNINGS)
_looked_at = 0  # captures that were outstanding at the last look
_most = 0  # that were outstanding when a forward began, since there were none
_usual = 0  # the same, where a backward then released them all
_recomputed: set[int] = set()  # modules whose forward ran inside a backward pass
_seen: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers
_reducers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers


def _reset() -> None:
    global _looked_at, _most, _usual
    _looked_at = _most = _usual = 0
    _beginnings.clear()
    _recomputed.clear()
    _seen.clear()
    _native.look_again()
    _reducers.clear()


observations.on_clear(_reset)


def forward_begins() -> None:
    """Captures that outlive the beginnings of several forwards await no backward, unless as many have met one before.
    Looks at their bytes each time that their number has doubled."""
    global _looked_at, _most, _usual
    outstanding = observations.captures()
    if not outstanding:
        if _beginnings or _looked_at:
            _looked_at, _most, _usual = 0, 0, max(_usual, _most)
            _beginnings.clear()
            observations.forget("captures")
        return
    _beginnings.append(outstanding)
    _most = max(_most, sum(outstanding.values()))
    if len(_beginnings) < _BEGINNINGS or _most <= _usual:
        return
    left = {module: min(then.get(module, 0) for then in _beginnings) for module in outstanding}
    if sum(left.values()) >= 2 * _looked_at:
        _look_at_captures(failed=False)


def captured_again(module: int, in_backward: bool, refused: bool) -> None:
    """A module's forward has run again: inside a backward pass, then it was activation checkpointing; or Opacus has
    refused to capture, because an earlier capture is still there."""
    if in_backward:
        _recomputed.add(module)
    if refused and observations.captures():
        _look_at_captures(failed=True, refused=True)


def step_failed() -> None:
    """Opacus found no per-sample gradients, or they do not fit: are there captures that kept them away?"""
    if observations.captures():
        _look_at_captures(failed=True)


def _look_at_captures(*, failed: bool, refused: bool = False) -> None:
    global _looked_at
    outstanding = observations.captures()
    _looked_at = sum(outstanding.values())
    sizes = dict.fromkeys(outstanding, 0)
    for block in _native.live_blocks():
        if block["category"] in _HOOKED:
            module = _native.module_id(block["module"])
            sizes[module] = sizes.get(module, 0) + block["bytes"]
    for module, size in sizes.items():
        more = {"captures": outstanding.get(module, 0), "recomputed": module in _recomputed}
        observations.note("captures", module, size, **more, failed=failed, refused=refused)


def functorch_sampled(layer: nn.Module, backprops: Tensor, samples: Mapping[Any, Tensor]) -> None:
    """functorch's sampler knows nothing of `requires_grad`."""
    frozen = [(parameter, sample) for parameter, sample in samples.items() if not parameter.requires_grad]
    if frozen:
        size = sum(sample.nbytes for _, sample in frozen)
        observations.note("frozen_samples", _native.owner_of(frozen[0][0]), size, samples=len(backprops))


def linear_norms_sampled(layer: nn.Linear, backprops: Tensor, samples: Mapping[Any, Tensor]) -> None:
    """Opacus' norm sampler of Linear makes matrices of tokens by tokens, (n, t, t), where backprops have 3 dimensions,
    and no norms where they have more."""
    shape = backprops.shape
    if len(shape) == 2:
        return
    weight, bias = layer.weight.requires_grad, layer.bias is not None and layer.bias.requires_grad
    if len(shape) > 3:
        if not samples:
            stale = getattr(layer.weight if weight else layer.bias, "_norm_sample", None)
            size = 0 if stale is None else stale.nbytes * (weight + bias)
            observations.note("norms_missing", _native.owner_of(layer.weight), size, dimensions=len(shape))
        return
    n, tokens, out = shape
    width = backprops.element_size()
    matrices = width * n * tokens**2 * (2 * weight + bias)
    gradients = width * n * (weight * layer.weight.numel() + bias * out)
    if matrices > gradients:
        more = {"gradient_bytes": gradients, "samples": n, "tokens": tokens, "features": tuple(layer.weight.shape)}
        observations.note("norm_matrices", _native.owner_of(layer.weight), matrices, **more)


def gradients_reduced(optimizer: Any) -> None:
    """Opacus sums up the ranks' gradients itself."""
    if optimizer not in _reducers:
        _reducers.add(optimizer)
        observations.note("gradients_reduced", 0, 0)


def noise_comes(optimizer: Any) -> None:
    """`add_noise` draws noise as large as each parameter, and puts a new tensor in the place of each `p.grad`. What
    autograd has accumulated there served ghost clipping's second pass, and nobody in the modes that clip per-sample
    gradients. One look at each optimizer."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    sizes: dict[int, int] = {}
    parameters: list[Any] = _native.tensors_in(optimizer.param_groups)
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        owner, gradient = _native.owner_of(parameter), parameter.grad
        observations.note("largest_parameter", owner, parameter.nbytes)
        if (shard := getattr(parameter, "_local_tensor", None)) is not None:
            observations.note("sharded_parameter", owner, parameter.nbytes, shard_bytes=shard.nbytes)
        if isinstance(optimizer, DPOptimizerFastGradientClipping) or gradient is None:
            continue
        if gradient.data_ptr() != parameter.summed_grad.data_ptr():
            sizes[owner] = sizes.get(owner, 0) + gradient.nbytes
    for owner, size in sizes.items():
        observations.note("replaced_gradients", owner, size)
