# SPDX-License-Identifier: Apache-2.0
"""Suggestions about memory that serves no purpose: leftovers, and gradients that are not used."""

from collections.abc import Iterator

from opacus_memprof.analysis.findings.run import largest
from opacus_memprof.analysis.oom.advice.base import DEFECT, LINE, Suggestion, suggest
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import PER_SAMPLE_MODES
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes, format_count


def release_leftovers(case: Case) -> Iterator[Suggestion]:
    """Suggests releasing what earlier steps, or forwards without a backward, have left behind."""
    left = case.leftovers
    if not left.bytes:
        return
    instant = case.peak(with_leftovers=False)
    size = f"{format_bytes(left.bytes)} ({largest(left.by_module)})"
    if left.are_captures:
        computed = f"Opacus holds {size} that it captured in forwards whose backward has not come."
        if left.stray_samples:
            computed += _sized_by_strays(case)
        yield suggest(
            case,
            instant,
            DEFECT,
            "forwards that no backward follows under torch.no_grad(), or in model.eval()",
            "with torch.no_grad():  # around every forward that no backward follows",
            computed,
            Action(kind="no_grad", modules=list(left.by_module)),
        )
        return
    steps = left.steps
    categories = ", ".join(name.replace("_", " ") for name in left.by_category)
    code = (
        "losses.append(loss.item())  # not the tensor, which keeps memory of its step; or .detach().cpu()"
        if "activations" in left.by_category
        else "# look for lists, dictionaries and attributes that tensors of each step are put into"
    )
    yield suggest(
        case,
        instant,
        DEFECT,
        f"letting go of what each step leaves behind: {categories}",
        code,
        f"{size} that {len(steps)} steps from {steps[0]} to {steps[-1]} made are alive still, about "
        f"{format_bytes(left.bytes // len(steps))} of each.",
        Action(kind="let_go", categories=list(left.by_category), modules=list(left.by_module)),
    )


def _sized_by_strays(case: Case) -> str:
    """A sentence about the effect of a stray forward with a larger batch on per-sample gradients."""
    most, now = max(case.leftovers.stray_samples), case.samples or 1
    gradients = sum(layer.per_sample_gradients(now) for layer in case.step.layers) if case.step is not None else 0
    return (
        f" One had {format_count(most, 'sample')}, and the forward after it {now}: as long as it is held, Opacus sizes "
        f"the per-sample gradients of every layer for {most}, {format_bytes(gradients * most // now)} instead of "
        f"{format_bytes(gradients)}."
    )


def drop_unused_gradients(case: Case) -> Iterator[Suggestion]:
    """Suggests dropping autograd's p.grad, which clipping of per-sample gradients does not use."""
    if case.shapes.mode not in PER_SAMPLE_MODES or not case.shapes.trained_bytes:
        return
    instant = case.peak(gradients="dropped")
    yield suggest(
        case,
        instant,
        LINE,
        "dropping each p.grad as autograd makes it",
        'for p in model.parameters(): p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))',
        f"p.grad takes {format_bytes(case.shapes.trained_bytes)} in backward, and nobody reads it: clipping uses "
        "grad_sample, and add_noise replaces it.",
        Action(kind="drop_gradients"),
    )


def set_gradients_to_none(case: Case) -> Iterator[Suggestion]:
    """Suggests zero_grad(set_to_none=True), if zero_grad keeps p.grad as zeros through the next forward."""
    if case.step is None or not case.step.keeps_gradients:
        return
    yield suggest(
        case,
        case.peak(gradients="zeroed"),
        LINE,
        "letting zero_grad drop p.grad",
        "optimizer.zero_grad(set_to_none=True)",
        f"Opacus' zero_grad fills p.grad with zeros, {format_bytes(case.shapes.trained_bytes)} that live through the "
        "next forward.",
        Action(kind="set_to_none"),
    )
