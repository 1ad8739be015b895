# SPDX-License-Identifier: Apache-2.0
"""Bytes by category at defined instants of a training step, and the peaks of its hooks. Arithmetic alone.

The instants: *after forward* (the loss is alive), *after backward*, *after step* (before `zero_grad`); and the
highest sum above entry inside one call of Opacus' backward hook, of `clip_and_accumulate` and of `add_noise`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.oracle.layer import Layer, peak

HOOKED = ("hooks", "functorch", "ghost")  # modes that capture inputs and output gradients


def trained_bytes(layers: Sequence[Layer]) -> int:
    return sum(layer.s * numel for layer in layers for numel in layer.trained)


def after_backward(layers: Sequence[Layer], mode: str, reduction: str) -> dict[str, int]:
    """What stays when `loss.backward()` has returned, from gradients that were None.

    Under hooks and functorch autograd fills `p.grad` beside `grad_sample`; ghost's second pass adds into the `p.grad`
    of the first; ExpandedWeights leave `p.grad` None. Captured inputs are gone in every mode. Ghost's model keeps the
    norms over all parameters in `per_sample_gradient_norms`: of clipping, they are all that stays.
    """
    per_sample = {
        "hooks": sum(sum(layer.per_sample_results) for layer in layers),
        "functorch": sum(sum(layer.per_sample_results) for layer in layers),
        "ew": sum(sum(layer.expanded_weights_results(reduction)) for layer in layers),
        "ghost": 0,
    }
    norms = sum(layer.s * layer.batch * len(layer.trained) for layer in layers)
    return {
        "per_sample_gradients": per_sample[mode],
        "norm_samples": norms if mode == "ghost" else 0,
        "gradients": trained_bytes(layers) if mode in HOOKED else 0,
        "summed_gradients": 0,
        "activation_hooks_shared": 0,
        "activation_hooks_opacus_only": 0,
        "clipping_temporaries": layers[0].b if mode == "ghost" else 0,
        "backprop_copies": 0,
        "temp_matrices": 0,
        "noise": 0,
    }


def after_step(layers: Sequence[Layer], mode: str, reduction: str) -> dict[str, int]:
    """Returns what stays when `optimizer.step()` has returned.

    It is what stays after backward, plus the sum of clipped gradients (kept until `zero_grad`); `p.grad` is the noised
    sum in every mode, and nothing of the noise is left.
    """
    summed = trained_bytes(layers)
    return after_backward(layers, mode, reduction) | {"gradients": summed, "summed_gradients": summed}


def adam_states(layers: Sequence[Layer], device: str = "cpu") -> int:
    """Two moments of the parameter's size for each parameter; and on the CPU, in every case, its float32 step count."""
    counts = 4 * sum(len(layer.trained) for layer in layers) if device == "cpu" else 0
    return 2 * trained_bytes(layers) + counts


def output_gradient_copy(layer: Layer, reduction: str) -> int:
    """`backprops * n`, made only for `mean`."""
    return layer.backprop if reduction == "mean" else 0


def hook_peak(layer: Layer, mode: str, reduction: str) -> int | None:
    """Highest bytes above entry in any one call of `capture_backprops_hook`, in the first step.

    The sampler's results are all alive while `create_or_accumulate_grad_sample` makes zeros of the same shape for each
    trained parameter and copies; a later call for the same step (a recurrent layer) adds in place. None where the
    sampler has no formula.
    """
    copy = output_gradient_copy(layer, reduction)
    norm = layer.norm_sampler() if mode == "ghost" else None
    if norm is not None:
        return peak((copy, *norm.timeline))
    sampler = layer.functorch_sampler() if mode == "functorch" else layer.grad_sampler()
    if sampler is None:
        return None
    kept = layer.per_sample_results
    entry = [copy, *sampler.timeline]
    first = [*entry, *kept]
    if mode != "ghost":
        return peak(first)
    # Fast gradient clipping, on the last call: the dict of results is deleted, but the loop's name holds the last
    # result. For each parameter: a zeros([B, 1]) that is thrown away, the norm, and grad_sample = None.
    b = layer.s * layer.batch
    norms = [-sum(sampler.results[:-1]), *(change for size in kept for change in (b, b, -b, -size))]
    if layer.calls == 1:
        return peak([*first, *norms])
    return max(peak(first), peak([*entry, *norms]))


def clip_peak(layers: Sequence[Layer], mode: str) -> int:
    """Highest bytes above entry in `DPOptimizer.clip_and_accumulate` with no `summed_grad` yet.

    A norm for each parameter; their stack, whose norm is each sample's; norm + 1e-6, its reciprocal, the quotient, the
    clamped factor; then the sum for each parameter, with norms and factors still alive. A `grad_sample` that is a
    permuted view is copied both for its norm and for its sum.
    """
    b = layers[0].b
    sums = [layer.s * numel for layer in layers for numel in layer.trained]
    copies = [copy for layer in layers for copy in layer.expanded_weights_copies()] if mode == "ew" else [0] * len(sums)
    timeline = [change for copy in copies for change in (copy, b, -copy)]
    timeline += [b * len(sums), b, -b * len(sums)]
    timeline += [b, b, b, -b, -b, b, -b]
    timeline += [change for summed, copy in zip(sums, copies, strict=True) for change in (copy, summed, -copy)]
    return peak(timeline)


def noise_peak(layers: Sequence[Layer], gradients: bool) -> int:
    """Highest bytes above entry in `add_noise` (std > 0, not secure mode).

    For each parameter: zeros that are never used, the noise (while the previous parameter's still has the name), then
    the noised sum, which replaces the parameter's `p.grad` if there is one (`gradients`).
    """
    timeline: list[int] = []
    previous = 0
    for size in (layer.s * numel for layer in layers for numel in layer.trained):
        timeline += [size, size, -size, -previous, size, -size if gradients else 0]
        previous = size
    return peak(timeline)
