# SPDX-License-Identifier: Apache-2.0
"""The mark of a profile that was recorded on virtual GPUs: which they were, and what they could not know."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from opacus_memprof.virtual_gpu.process import VirtualGpu, active, default_answers

if TYPE_CHECKING:
    from opacus_memprof.virtual_gpu.values import Use

_MOST_WARNINGS = 20  # of one kind: profile.json has all


def describe_gpus() -> dict[str, Any] | None:
    """The virtual GPUs of this process, as `virtual` of meta.json has them; None in a process without."""
    found = active()
    if found is None:
        return None
    return {
        "gpu": found.kind,
        "name": found.gpu.name,
        "memory_bytes": found.gpu.total_memory,
        "devices": found.count,
    }


def describe_run() -> dict[str, Any] | None:
    """`virtual` of profile.json: the virtual GPUs, and what this run has so far asked them that they do not know.
    Imports torch."""
    gpus = describe_gpus()
    if gpus is None:
        return None
    from opacus_memprof.virtual_gpu import values

    return {
        **gpus,
        "unknown_reads": [asdict(use) for use in values.unknown_reads()],
        "assumed_shapes": [asdict(use) for use in values.assumed_shapes()],
        "not_computed": values.failures(),
        "default_answers": default_answers(),
    }


def describe_limits() -> list[str]:
    """A sentence for whatever this run could not know, or that would be otherwise on a real GPU. Imports torch."""
    found = active()
    if found is None:
        return []
    from opacus_memprof.virtual_gpu import values

    reads = _about(
        values.unknown_reads(),
        "read what the virtual GPU does not compute, and got zeros: what the program decides by them may be otherwise "
        "on a real GPU",
    )
    shapes = _about(
        values.assumed_shapes(),
        "took its shape or its indices from what the virtual GPU does not compute: a bound stands for them, and a real "
        "GPU may allocate less",
    )
    return [*_about_kernels(found), *reads, *shapes]


def _about(uses: "list[Use]", what: str) -> list[str]:
    said = []
    for use in uses[:_MOST_WARNINGS]:
        times = f", {use.count} times," if use.count > 1 else ""
        said.append(f"{use.operation} {f'at {use.line}' if use.line else 'in backward'}{times} {what}")
    if rest := uses[_MOST_WARNINGS:]:
        said.append(f"{sum(use.count for use in rest)} more operations of {len(rest)} lines {what}")
    return said


def _about_kernels(found: VirtualGpu) -> list[str]:
    import torch

    kernels = torch.cuda.get_arch_list()
    if not kernels or any(_runs_on(kernel, found.gpu.major, found.gpu.minor) for kernel in kernels):
        return []
    return [
        f"torch {torch.__version__} has kernels for {', '.join(kernels)} and none that runs on a real {found.gpu.name} "
        f"(compute capability {found.gpu.major}.{found.gpu.minor}): there this training needs another build of torch, "
        "which may allocate otherwise"
    ]


def _runs_on(kernel: str, major: int, minor: int) -> bool:
    """Whether code for `kernel` (sm_90, sm_90a, or compute_90 as PTX) runs on a compute capability.

    Machine code runs within its major version, PTX on whatever is newer, and what is for one architecture alone (90a)
    only there."""
    kind, _, version = kernel.partition("_")
    digits = version.rstrip("af")
    if not digits.isdecimal():
        return False
    of = divmod(int(digits), 10)
    if version.endswith("a"):
        return of == (major, minor)
    if kind == "compute" and digits == version:
        return of <= (major, minor)
    return of[0] == major and of[1] <= minor
