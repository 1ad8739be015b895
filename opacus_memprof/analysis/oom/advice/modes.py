# SPDX-License-Identifier: Apache-2.0
"""Suggestions of another way to compute the same clipped gradients."""

from collections.abc import Iterator

from opacus_memprof.analysis.oom.advice.base import (
    LINE,
    MODE,
    MODE_AND_BATCH,
    OTHER_MODE,
    Suggestion,
    suggest,
)
from opacus_memprof.analysis.oom.advice.batch import batch_action, batch_code, largest_that_fits
from opacus_memprof.analysis.oom.flash import FlashClip
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import PER_SAMPLE_MODES, Step
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes, format_count


def norms_without_squares(case: Case) -> Iterator[Suggestion]:
    """Suggests ghost clipping with norm samplers that form no T x T matrices."""
    step = case.step
    if step is None or step.mode != "ghost" or not step.forms_squares:
        return
    n = step.samples
    costly = {layer.name: layer.ghost_norms(n) for layer in step.layers if layer.forward.tokens > 1}
    costly = {name: size for name, size in costly.items() if size > 64 * 2**20 or size > case.peak().bytes // 20}
    if not costly or case.shapes.flash_clip_refusal() is not None:
        return
    instant = case.peak_of(step.with_changes(forms_squares=False))
    largest = max(costly, key=lambda name: costly[name])
    yield suggest(
        case,
        instant,
        LINE,
        f"norms without matrices of tokens by tokens in {format_count(len(costly), 'layer')}",
        "opacus_memprof.clipping.register_norm_samplers()  # before training; ghost clipping stays",
        f"Norms of {largest} make T x T matrices of {format_bytes(costly[largest])} (s n T^2, three with a bias, two "
        "without); these samplers work in tiles.",
        Action(kind="register_norm_samplers"),
    )


def adopted_samples(case: Case) -> Iterator[Suggestion]:
    """Suggests per-sample gradients without the copy that Opacus makes of what its grad samplers return."""
    step = case.step
    if step is None or step.mode not in ("hooks", "functorch") or not step.layers:
        return
    size, name = max((layer.per_sample_gradients(step.samples), layer.name) for layer in step.layers)
    yield suggest(
        case,
        case.peak_of(step.with_changes(copies_samples=False)),
        LINE,
        "per-sample gradients without a copy of each",
        "opacus_memprof.clipping.adopt_grad_samples()  # before training",
        f"Opacus copies what its grad samplers return into zeros of the same size, {format_bytes(size)} for {name}; "
        "without the copy, backward holds a layer's once.",
        Action(kind="adopt_grad_samples"),
    )


def another_mode(case: Case) -> Iterator[Suggestion]:
    """Suggests flash_clip, ghost or hooks instead of the current mode; with a smaller physical batch if the mode alone
    does not fit."""
    step = case.step
    if step is None or step.mode not in (*PER_SAMPLE_MODES, "ghost", "fast"):
        return
    for mode, change in (("flash_clip", MODE), ("ghost", OTHER_MODE), ("hooks", OTHER_MODE)):
        if mode == step.mode or (mode == "hooks" and step.mode in PER_SAMPLE_MODES):
            continue
        if mode == "flash_clip" and case.shapes.flash_clip_refusal() is not None:
            continue
        other = step.with_changes(mode=mode, keeps_gradients=step.keeps_gradients and mode != "flash_clip")
        instant = case.peak_of(other)
        yield suggest(case, instant, change, f'grad_sample_mode="{mode}"', _code(mode), _why(step, mode), _action(mode))
        if case.fits(instant.bytes) is False:
            found = largest_that_fits(case, lambda n, other=other: case.peak_of(other, n))  # type: ignore[misc]
            if found is not None:
                yield suggest(
                    case,
                    found[1],
                    MODE_AND_BATCH,
                    f'grad_sample_mode="{mode}", and a physical batch of at most {format_count(found[0], "sample")}',
                    f"{_code(mode)}\n{batch_code(found[0])}",
                    _why(step, mode),
                    _action(mode),
                    batch_action(found[0]),
                )


def _action(mode: str) -> Action:
    return Action(kind="grad_sample_mode", value=mode)


def _code(mode: str) -> str:
    if mode == "flash_clip":
        return 'opacus_memprof.PrivacyEngine().make_private(..., grad_sample_mode="flash_clip")'
    if mode == "ghost":
        return (
            "model, optimizer, criterion, loader = engine.make_private(..., criterion=criterion, "
            'grad_sample_mode="ghost")'
        )
    return f'engine.make_private(..., grad_sample_mode="{mode}")'


def _why(step: Step, mode: str) -> str:
    n = step.samples
    samples = sum(layer.per_sample_gradients(n) for layer in step.layers)
    if mode == "hooks":
        squares = max((layer.ghost_norms(n) for layer in step.layers), default=0)
        return (
            f"Per-sample gradients of all layers are {format_bytes(samples)} (s n w), and norms of a single layer "
            f"take {format_bytes(squares)} here."
        )
    if mode == "flash_clip":
        kept = sum(FlashClip(layer, in_registers=step.on_gpu).kept_bytes(n) for layer in step.layers)
        return (
            f"Per-sample gradients of all layers would be {format_bytes(samples)} (s n w); this mode keeps "
            f"{format_bytes(kept)}, of each layer whichever is less of its gradients and what they are made of, and no "
            "p.grad."
        )
    return (
        f"Per-sample gradients of all layers are {format_bytes(samples)} (s n w), which this mode does not keep; what "
        "autograd saves lives through a second backward pass instead."
    )
