# SPDX-License-Identifier: Apache-2.0
"""What should not be there at all."""

from collections.abc import Iterator

from opacus_memprof.analysis.findings.run import largest
from opacus_memprof.analysis.oom.advice.base import DEFECT, LINE, Suggestion, suggestion
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import SAMPLES
from opacus_memprof.units import format_bytes


def let_go(case: Case) -> Iterator[Suggestion]:
    """What earlier steps, or forwards without a backward, have left behind."""
    left = case.left
    if not left.bytes:
        return
    instant = case.peak(left=False)
    held = f"{format_bytes(left.bytes)} ({largest(left.by_module)})"
    if left.captures:
        yield suggestion(
            case,
            instant,
            DEFECT,
            "forwards that no backward follows under torch.no_grad(), or in model.eval()",
            "with torch.no_grad():  # around every forward that no backward follows",
            f"Opacus holds {held} that it captured in forwards whose backward has not come.",
            {"kind": "no_grad", "modules": list(left.by_module)},
        )
        return
    steps = left.steps
    categories = ", ".join(name.replace("_", " ") for name in left.by_category)
    code = (
        "losses.append(loss.item())  # not the tensor, which keeps memory of its step; or .detach().cpu()"
        if "activations" in left.by_category
        else "# look for lists, dictionaries and attributes that tensors of each step are put into"
    )
    yield suggestion(
        case,
        instant,
        DEFECT,
        f"letting go of what each step leaves behind: {categories}",
        code,
        f"{held} that {len(steps)} steps from {steps[0]} to {steps[-1]} made are alive still, about "
        f"{format_bytes(left.bytes // len(steps))} of each.",
        {"kind": "let_go", "categories": list(left.by_category), "modules": list(left.by_module)},
    )


def discarded_gradients(case: Case) -> Iterator[Suggestion]:
    """Autograd's p.grad, which clipping of per-sample gradients never reads."""
    if case.workload.mode not in SAMPLES or not case.workload.trained_bytes:
        return
    instant = case.peak(gradients="dropped")
    yield suggestion(
        case,
        instant,
        LINE,
        "dropping each p.grad as autograd makes it",
        'for p in model.parameters(): p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))',
        f"p.grad takes {format_bytes(case.workload.trained_bytes)} in backward, and nobody reads it: clipping uses "
        "grad_sample, and add_noise replaces it.",
        {"kind": "drop_gradients"},
    )


def gradients_set_to_none(case: Case) -> Iterator[Suggestion]:
    """Opacus' zero_grad keeps p.grad, as zeros, through the next forward."""
    if case.step is None or not case.step.keeps_gradients:
        return
    yield suggestion(
        case,
        case.peak(gradients="zeroed"),
        LINE,
        "letting zero_grad drop p.grad",
        "optimizer.zero_grad(set_to_none=True)",
        f"Opacus' zero_grad fills p.grad with zeros, {format_bytes(case.workload.trained_bytes)} that live through the "
        "next forward.",
        {"kind": "set_to_none"},
    )
