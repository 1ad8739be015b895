# SPDX-License-Identifier: Apache-2.0
"""Functions that wrappers call to record observations for findings, which the event file does not contain.

Examples are shapes of layers, captures that accumulate, and gradients that are about to be replaced. Each call costs a
fraction of the Opacus call that it observes.
"""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opacus_memprof.hooks.vocabulary import DPOptimizerFastGradientClipping
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.faults import contain

_CAPTURE_CATEGORIES = ("activation_hooks_shared", "activation_hooks_opacus_only")
# Number of consecutive forwards that must begin with outstanding captures before this is recorded: fewer may share one
# backward.
_FORWARDS_IN_A_ROW = 3

_at_forward_begin: "deque[dict[int, int]]" = deque(maxlen=_FORWARDS_IN_A_ROW)  # captures by module
_recorded = 0  # captures that were outstanding when their bytes were last recorded
_most_outstanding = 0  # at the beginning of a forward, since the last one that began with none
_most_released = 0  # the highest `_most_outstanding` that a backward has brought down to 0
_recomputed: set[int] = set()  # ids of modules whose forward ran inside a backward pass
_noise_optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # seen by on_add_noise
_reducing_optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # seen by on_reduce_gradients


def _reset() -> None:
    global _recorded, _most_outstanding, _most_released
    _recorded = _most_outstanding = _most_released = 0
    _at_forward_begin.clear()
    _recomputed.clear()
    _noise_optimizers.clear()
    native.forget_observed_shapes()
    _reducing_optimizers.clear()


observations.on_clear(_reset)


def on_forward_begin() -> bool:
    """Records captures that no backward pass will release, and returns whether any are outstanding.

    Counts forwards that begin while captures are outstanding. Three consecutive ones mean that no backward will release
    them, unless a backward has released as many before. The observations are updated whenever the number of captures
    has doubled.
    """
    global _recorded, _most_outstanding, _most_released
    outstanding = observations.captures()
    if not outstanding:
        if _at_forward_begin or _recorded:
            _recorded, _most_outstanding, _most_released = 0, 0, max(_most_released, _most_outstanding)
            _at_forward_begin.clear()
            observations.discard("captures")
        return False
    _at_forward_begin.append(outstanding)
    _most_outstanding = max(_most_outstanding, sum(outstanding.values()))
    if len(_at_forward_begin) < _FORWARDS_IN_A_ROW or _most_outstanding <= _most_released:
        return True
    outlasted = {module: min(counts.get(module, 0) for counts in _at_forward_begin) for module in outstanding}
    if sum(outlasted.values()) >= 2 * _recorded:
        _record_captures(failed=False)
    return True


@contain("observing a forward pass that ran again")
def on_recapture(module: int, in_backward: bool, refused: bool) -> None:
    """Observes a module's forward that ran again before its captures were released.

    Args:
        module: the module's id.
        in_backward: whether the forward ran inside a backward pass, as in activation checkpointing.
        refused: whether Opacus refused to capture, because an earlier capture is still outstanding.
    """
    if in_backward:
        _recomputed.add(module)
    if refused and observations.captures():
        _record_captures(failed=True, refused=True)


def on_step_failure() -> None:
    """Records outstanding captures when Opacus' step has raised.

    They may be the reason why per-sample gradients are missing or have another batch size.
    """
    if observations.captures():
        _record_captures(failed=True)


def _record_captures(*, failed: bool, refused: bool = False) -> None:
    global _recorded
    outstanding = observations.captures()
    _recorded = sum(outstanding.values())
    sizes = dict.fromkeys(outstanding, 0)
    for block in native.live_blocks():
        if block["category"] in _CAPTURE_CATEGORIES:
            module = native.module_id(block["module"])
            sizes[module] = sizes.get(module, 0) + block["bytes"]
    for module, size in sizes.items():
        details = {"captures": outstanding.get(module, 0), "recomputed": module in _recomputed}
        observations.record("captures", module, size, **details, failed=failed, refused=refused)


@contain("observing per-sample gradients")
def on_functorch_samples(layer: nn.Module, backprops: Tensor, samples: Mapping[Any, Tensor]) -> None:
    """Records per-sample gradients of frozen parameters: functorch's sampler ignores `requires_grad`."""
    frozen = [(parameter, sample) for parameter, sample in samples.items() if not parameter.requires_grad]
    if frozen:
        size = sum(sample.nbytes for _, sample in frozen)
        details = {"samples": len(backprops), "mode": observations.layer_shapes().mode, "layer": type(layer).__name__}
        observations.record("frozen_samples", native.owner_of(frozen[0][0]), size, **details)


@contain("observing norm samples")
def on_linear_norm_samples(layer: nn.Linear, backprops: Tensor, samples: Mapping[Any, Tensor]) -> None:
    """Records cases in which Opacus' norm sampler of Linear is wasteful or computes nothing.

    For backprops with 3 dimensions it makes (n, t, t) matrices for n samples of t tokens, which may be larger than
    per-sample gradients. For more than 3 dimensions it returns no norms.
    """
    shape = backprops.shape
    if len(shape) == 2:
        return
    weight, bias = layer.weight.requires_grad, layer.bias is not None and layer.bias.requires_grad
    if len(shape) > 3:
        if not samples:
            stale = getattr(layer.weight if weight else layer.bias, "_norm_sample", None)
            size = 0 if stale is None else stale.nbytes * (weight + bias)
            observations.record("norms_missing", native.owner_of(layer.weight), size, dimensions=len(shape))
        return
    n, tokens, out = shape
    width = backprops.element_size()
    matrices = width * n * tokens**2 * (2 * weight + bias)
    gradients = width * n * (weight * layer.weight.numel() + bias * out)
    if matrices > gradients:
        details = {"gradient_bytes": gradients, "samples": n, "tokens": tokens, "features": tuple(layer.weight.shape)}
        observations.record("norm_matrices", native.owner_of(layer.weight), matrices, **details)


def on_reduce_gradients(optimizer: Any) -> None:
    """Records that Opacus' optimizer adds up the ranks' gradients itself. For flash_clip, DDP does not do it again."""
    if optimizer not in _reducing_optimizers and not hasattr(optimizer, "bookkeeping"):
        _reducing_optimizers.add(optimizer)
        observations.record("gradients_reduced", 0, 0)


def on_add_noise(optimizer: Any) -> None:
    """Records, once per optimizer, the largest parameter and the gradients that `add_noise` is about to replace.

    `add_noise` draws noise of each parameter's shape, and assigns a new tensor to each `p.grad`. The gradient that
    autograd has accumulated there is used by ghost clipping only, not in the modes that clip per-sample gradients.
    """
    if optimizer in _noise_optimizers:
        return
    _noise_optimizers.add(optimizer)
    sizes: dict[int, int] = {}
    parameters: list[Any] = native.tensors_in(optimizer.param_groups)
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        owner, gradient = native.owner_of(parameter), parameter.grad
        observations.record("largest_parameter", owner, parameter.nbytes)
        shard = getattr(parameter, "_local_tensor", None)
        if shard is not None and not hasattr(optimizer, "bookkeeping"):  # flash_clip draws the shards' noise alone
            observations.record("sharded_parameter", owner, parameter.nbytes, shard_bytes=shard.nbytes)
        if isinstance(optimizer, DPOptimizerFastGradientClipping) or gradient is None:
            continue
        if gradient.data_ptr() != parameter.summed_grad.data_ptr():
            sizes[owner] = sizes.get(owner, 0) + gradient.nbytes
    for owner, size in sizes.items():
        observations.record("replaced_gradients", owner, size)
