# SPDX-License-Identifier: Apache-2.0
"""Describes the virtual GPUs of a run for its profile, and the unknown values that the run used."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from opacus_memprof.profiles.profile import EstimatedWorkspaces, UnknownUse, VirtualGpus
from opacus_memprof.virtual_gpu.collectives import OBJECTS
from opacus_memprof.virtual_gpu.decisions import decides
from opacus_memprof.virtual_gpu.devices import Gpu
from opacus_memprof.virtual_gpu.process import active, default_answers, estimated_workspaces, proofs_left_out

if TYPE_CHECKING:
    from opacus_memprof.virtual_gpu.values import Use

_PACKAGE = f"{Path(__file__).parents[1]}/"
_OF_RANKS = "ranks: "  # before an operation that read what other ranks give, as csrc/virtual_values/counts.h has it
_VALUES = ("aten::item", "aten::copy_", "aten::equal")  # operations that read a value, and give no shape by it
_MAX_WARNINGS = 20  # of one kind; profile.json has all uses


@dataclass(frozen=True)
class _Counts:
    """The number of uses of unknown values since the process started."""

    unknown_reads: "list[Use]" = field(default_factory=list)
    assumed_shapes: "list[Use]" = field(default_factory=list)
    not_computed: dict[str, int] = field(default_factory=dict)
    default_answers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls) -> "_Counts":
        from opacus_memprof.virtual_gpu import values

        return cls(values.unknown_reads(), values.assumed_shapes(), values.failures(), default_answers())

    def since(self, earlier: "_Counts") -> "_Counts":
        return _Counts(
            _subtract_uses(self.unknown_reads, earlier.unknown_reads),
            _subtract_uses(self.assumed_shapes, earlier.assumed_shapes),
            _subtract(self.not_computed, earlier.not_computed),
            _subtract(self.default_answers, earlier.default_answers),
        )


def _subtract(counts: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    return {name: count - earlier.get(name, 0) for name, count in counts.items() if count > earlier.get(name, 0)}


def _subtract_uses(uses: "list[Use]", earlier: "list[Use]") -> "list[Use]":
    counts = {replace(use, count=0): use.count for use in earlier}
    differences = [replace(use, count=use.count - counts.get(replace(use, count=0), 0)) for use in uses]
    return [use for use in differences if use.count]


def _by_line(uses: "list[Use]") -> list[UnknownUse]:
    """Adds up the uses of each line, on whatever way the program has come there."""
    counts: Counter[tuple[str, str]] = Counter()
    for use in uses:
        counts[use.operation, use.line] += use.count
    return [UnknownUse(operation, line, count) for (operation, line), count in counts.items()]


_at_begin = _Counts()


def begin_run() -> None:
    """Makes `describe_run` and `describe_limits` count from now on. Imports torch.

    A process may record several profiles.
    """
    global _at_begin
    if active() is not None:
        _at_begin = _Counts.now()


def describe_gpus() -> VirtualGpus | None:
    """Returns the virtual GPUs of this process, for `virtual` in meta.json, or None."""
    gpus = active()
    if gpus is None:
        return None
    return VirtualGpus(
        gpu=gpus.kind,
        name=gpus.gpu.name,
        memory_bytes=gpus.gpu.total_memory,
        devices=gpus.count,
    )


def describe_run() -> VirtualGpus | None:
    """Returns the virtual GPUs of this process, with the unknown values that the run has used since `begin_run`.

    For `virtual` in profile.json. Imports torch.
    """
    gpus = describe_gpus()
    if gpus is None:
        return None
    counts = _Counts.now().since(_at_begin)
    convolutions, largest_bytes = estimated_workspaces()
    return VirtualGpus(
        **gpus,
        unknown_reads=_by_line(
            [replace(use, operation=use.operation.removeprefix(_OF_RANKS)) for use in counts.unknown_reads]
        ),
        assumed_shapes=_by_line(counts.assumed_shapes),
        not_computed=counts.not_computed,
        default_answers=counts.default_answers,
        estimated_workspaces=EstimatedWorkspaces(convolutions, largest_bytes),
        proofs_left_out=proofs_left_out(),
    )


def describe_limits() -> list[str]:
    """Returns a sentence for each use of an unknown value, and for what may differ on a real GPU. Imports torch."""
    gpus = active()
    if gpus is None:
        return []
    counts = _Counts.now().since(_at_begin)
    matter = [use for use in counts.unknown_reads if _matters(use)]
    ranks = _sentences(
        [use for use in matter if use.operation.startswith(_OF_RANKS)],
        "read values that other ranks give, and got what these would be if every rank had this rank's data: on real "
        "GPUs the program may branch differently here",
    )
    reads = _sentences(
        [use for use in matter if not use.operation.startswith(_OF_RANKS)],
        "read values that the virtual GPU does not compute, and got zeros: on a real GPU the program may branch "
        "differently here",
    )
    shapes = _sentences(
        [use for use in counts.assumed_shapes if not (_of_this_package(use) or _is_shown(use))],
        "took its shape or its indices from values that the virtual GPU does not compute: an upper bound is used, and "
        "a real GPU may allocate less",
    )
    return [*_kernel_warnings(gpus.gpu), *_refusals_by_flash_clip(), *ranks, *reads, *shapes]


def _refusals_by_flash_clip() -> list[str]:
    """Returns a warning if the program computes a matrix of samples by samples where a proof was left out."""
    from opacus_memprof.recording import observations  # loads torch

    shapes = observations.layer_shapes()
    if not (proofs_left_out() and shapes.mode == "flash_clip" and shapes.mixes_samples()):
        return []
    return [
        "the model or its loss makes a matrix of samples by samples, as a contrastive loss does: on a real device "
        "flash_clip probably refuses the first step, because what it makes of one sample depends on others; train one "
        "step on the CPU to know"
    ]


def _matters(use: "Use") -> bool:
    if use.operation.endswith(OBJECTS):  # whose frames of this package stand for torch's own
        return decides(tuple(dropwhile(lambda frame: f"{frame.file}:{frame.line}" != use.line, use.frames)))
    if use.operation.startswith(_OF_RANKS) and use.operation.removeprefix(_OF_RANKS) not in _VALUES:
        return True  # a shape
    return not (_of_this_package(use) or _checks_ranks(use)) and decides(use.frames)


def _is_shown(use: "Use") -> bool:
    """Returns whether a tensor is printed, for which torch looks at its values."""
    return any(frame.file.endswith("torch/_tensor_str.py") for frame in use.frames)


def _checks_ranks(use: "Use") -> bool:
    """Returns whether torch has asked whether the ranks agree, as DDP does of its parameters: here they do."""
    checks = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
    return use.operation.startswith(_OF_RANKS) and bool(use.frames) and use.frames[0].file.endswith(checks)


def _of_this_package(use: "Use") -> bool:
    """Returns whether this package's own code has asked: flash_clip's checks of itself are not the program's."""
    frames = takewhile(lambda frame: f"{frame.file}:{frame.line}" != use.line, use.frames)
    return any(frame.file.startswith(_PACKAGE) for frame in frames)


def _sentences(uses: "list[Use]", predicate: str) -> list[str]:
    sentences = []
    lines = _by_line(uses)
    for use in lines[:_MAX_WARNINGS]:
        times = f", {use.count} times," if use.count > 1 else ""
        operation = use.operation.removeprefix(_OF_RANKS)
        sentences.append(f"{operation} {f'at {use.line}' if use.line else 'in backward'}{times} {predicate}")
    if rest := lines[_MAX_WARNINGS:]:
        sentences.append(f"{sum(use.count for use in rest)} more operations of {len(rest)} lines {predicate}")
    return sentences


def _kernel_warnings(gpu: Gpu) -> list[str]:
    import torch

    kernels = torch.cuda.get_arch_list()
    if not kernels or any(_runs_on(kernel, gpu.major, gpu.minor) for kernel in kernels):
        return []
    return [
        f"torch {torch.__version__} has kernels for {', '.join(kernels)} and none that runs on a real {gpu.name} "
        f"(compute capability {gpu.major}.{gpu.minor}): there this training needs another build of torch, which may "
        "allocate differently"
    ]


def _runs_on(kernel: str, major: int, minor: int) -> bool:
    """Returns whether code for `kernel` (sm_90, sm_90a, or compute_90 for PTX) runs on a compute capability.

    Machine code runs on the same major version, PTX on any newer one, and code for a specific architecture (90a) only
    on that one.
    """
    kind, _, version = kernel.partition("_")
    digits = version.rstrip("af")
    if not digits.isdecimal():
        return False
    built_for = divmod(int(digits), 10)
    if version.endswith("a"):
        return built_for == (major, minor)
    if kind == "compute" and digits == version:
        return built_for <= (major, minor)
    return built_for[0] == major and built_for[1] <= minor
