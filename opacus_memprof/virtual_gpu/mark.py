# SPDX-License-Identifier: Apache-2.0
"""The mark of a profile that was recorded on virtual GPUs: which they were, and what they could not know."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from opacus_memprof.virtual_gpu.process import VirtualGpu, active, default_answers

if TYPE_CHECKING:
    from opacus_memprof.virtual_gpu.values import Use

_MOST_WARNINGS = 20  # of one kind: profile.json has all


@dataclass(frozen=True)
class _Counts:
    """What the process has asked that the virtual GPU does not know: counted from its start on."""

    unknown_reads: "list[Use]" = field(default_factory=list)
    assumed_shapes: "list[Use]" = field(default_factory=list)
    not_computed: dict[str, int] = field(default_factory=dict)
    default_answers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls) -> "_Counts":
        from opacus_memprof.virtual_gpu import values

        return cls(values.unknown_reads(), values.assumed_shapes(), values.failures(), default_answers())

    def since(self, begin: "_Counts") -> "_Counts":
        return _Counts(
            _uses_since(self.unknown_reads, begin.unknown_reads),
            _uses_since(self.assumed_shapes, begin.assumed_shapes),
            _since(self.not_computed, begin.not_computed),
            _since(self.default_answers, begin.default_answers),
        )


def _since(now: Mapping[str, int], begin: Mapping[str, int]) -> dict[str, int]:
    return {name: count - begin.get(name, 0) for name, count in now.items() if count > begin.get(name, 0)}


def _uses_since(now: "list[Use]", begin: "list[Use]") -> "list[Use]":
    before = {(use.operation, use.line): use.count for use in begin}
    less = [replace(use, count=use.count - before.get((use.operation, use.line), 0)) for use in now]
    return [use for use in less if use.count]


_begin = _Counts()


def begin_run() -> None:
    """Lets `describe_run` and `describe_limits` count from here on: one process may record several profiles. Imports
    torch."""
    global _begin
    if active() is not None:
        _begin = _Counts.now()


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
    """`virtual` of profile.json: the virtual GPUs, and what has been asked of them since `begin_run` that they
    do not know. Imports torch."""
    gpus = describe_gpus()
    if gpus is None:
        return None
    return {**gpus, **asdict(_Counts.now().since(_begin))}


def describe_limits() -> list[str]:
    """A sentence for whatever this run could not know, or that would be otherwise on a real GPU. Imports torch."""
    found = active()
    if found is None:
        return []
    counts = _Counts.now().since(_begin)
    reads = _about(
        counts.unknown_reads,
        "read what the virtual GPU does not compute, and got zeros: what the program decides by them may be otherwise "
        "on a real GPU",
    )
    shapes = _about(
        counts.assumed_shapes,
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
