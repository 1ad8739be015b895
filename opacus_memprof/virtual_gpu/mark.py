# SPDX-License-Identifier: Apache-2.0
"""The mark of a profile that was recorded on virtual GPUs: which they were, and what they could not know."""

from typing import Any

from opacus_memprof.virtual_gpu.process import VirtualGpu, active, default_answers


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
    """`virtual` of profile.json: the virtual GPUs, and so far the answers that may differ from a real GPU's."""
    gpus = describe_gpus()
    return None if gpus is None else {**gpus, "default_answers": default_answers()}


def describe_limits() -> list[str]:
    """A sentence for whatever this run could not know, or that would be otherwise on a real GPU."""
    found = active()
    return [] if found is None else _about_kernels(found)


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
