# SPDX-License-Identifier: Apache-2.0
"""Installs and uninstalls the recording allocators.

A recording allocator wraps torch's own: it passes every call on and records it. It does not change the training run.
Source: csrc/allocators.
"""

import contextlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording import native

_PID = os.getpid()  # of the process that has loaded the extension


class Allocator:
    """The argument of `torch.cuda.memory.change_current_allocator`."""

    def allocator(self) -> Any:
        """Returns the `torch._C._cuda_CUDAAllocator` that delegates to torch's caching allocator."""
        return native.cuda_allocator()


def allocator() -> Allocator:
    """Returns the recording allocator, for `torch.cuda.memory.change_current_allocator(opacus_memprof.allocator())`.

    torch accepts it only before CUDA is initialised; `install` works at any time.

    Raises:
        MemprofError: the extension was built without CUDA.
    """
    _check_cuda_build()
    return Allocator()


def install(device: str = "auto") -> None:
    """Installs the recording allocator of `device` ("auto", "cuda" or "cpu"), also after CUDA is initialised.

    Blocks that exist already count as `unattributed` until they are freed or attached. A second call does nothing.

    Raises:
        MemprofError: the device is unknown, there is no GPU, the extension was built without CUDA, torch's current
            allocator is not the one that the recording allocator already delegates to, or the process was forked from
            one that had loaded the extension.
    """
    refuse_after_fork()
    try:
        if resolve_device(device) == "cpu":
            native.cpu_install()
        else:
            native.cuda_install()
    except RuntimeError as error:
        raise MemprofError(str(error)) from error


def tell_program() -> None:
    """Tells the allocators which code is the user's own, whose lines they record, and how to shorten its paths.

    Not the user's own are Python's library, installed packages, and this package, torch and Opacus wherever they are.
    """
    folders = [*_library_folders()]
    program = [os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv else ""))]
    native.set_program(_beginnings([*folders, *map(os.path.realpath, folders)]), _beginnings(program))


def _library_folders() -> Iterator[str]:
    paths = sysconfig.get_paths()
    yield from (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts"))
    yield str(Path(__file__).parents[1])
    for package in ("torch", "opacus"):
        with contextlib.suppress(ImportError):  # an import hook may refuse Opacus
            spec = importlib.util.find_spec(package)
            yield from (spec and spec.submodule_search_locations) or ()


def _beginnings(folders: list[str]) -> list[str]:
    return [os.path.join(folder, "") for folder in dict.fromkeys(folders)]


def uninstall() -> None:
    """Restores torch's own allocators. Live tensors stay valid. A second call does nothing."""
    uninstall_device("cpu")
    if native.HAS_CUDA:
        uninstall_device("cuda")


def uninstall_device(device: str) -> None:
    """Restores torch's own allocator of `device` ("cuda" or "cpu"), if the recording one is current."""
    if device == "cpu":
        native.cpu_uninstall()
    else:
        native.cuda_uninstall()


def library_path() -> str:
    """Returns the path for `CUDAPluggableAllocator(path, "opacus_memprof_malloc", "opacus_memprof_free")`.

    The class is in `torch.cuda.memory`. This fallback lacks features of torch's caching allocator; docs/python.md lists
    them.

    Raises:
        MemprofError: the extension was built without CUDA.
    """
    _check_cuda_build()
    spec = importlib.util.find_spec("opacus_memprof._C")
    assert spec is not None  # recording.native has imported it
    assert spec.origin is not None
    return spec.origin


def refuse_after_fork() -> None:
    """Raises MemprofError in a process that was forked after the extension had been loaded.

    There, the allocator's locks and counts belong to the parent's threads, and nothing is recorded.

    Raises:
        MemprofError: the process was forked after that.
    """
    if os.getpid() != _PID:
        raise MemprofError(
            "this process was forked after opacus_memprof had been used, and cannot record: start it by spawn "
            '(multiprocessing.get_context("spawn")), or use opacus_memprof in the child alone'
        )


def resolve_device(device: str) -> str:
    """Returns the device to record: "cuda" or "cpu" for "auto", "cuda" or "cpu". Never initialises CUDA.

    Raises:
        MemprofError: the device is unknown or not available.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise MemprofError(f'there is no device "{device}": use auto, cuda or cpu')
    if device == "cpu" or (device == "auto" and not _cuda_available()):
        return "cpu"
    _check_cuda_build()
    if not _cuda_available():
        raise MemprofError("torch finds no CUDA device here: use the device cpu, or see `opacus-memprof doctor`")
    return "cuda"


def is_installed(device: str) -> bool:
    """Returns whether the recording allocator of `device` ("cuda" or "cpu") is torch's current one."""
    return native.cpu_installed() if device == "cpu" else native.cuda_installed()


def allocator_warnings(device: str) -> list[str]:
    """Returns warnings about limits of the measurement with torch's current allocator of `device`."""
    if device == "cpu":
        return []
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return [
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts nothing itself, so the categories cannot be "
            "reconciled, and rounding and cached are unknown"
        ]
    backend = native.cuda_current_name().removeprefix("opacus_memprof over ")
    if backend == "cudaMallocAsync":
        return ["the backend is cudaMallocAsync: the driver does not tell its rounding, which counts as cached"]
    if backend != "native":
        return [f"the allocator in place is {backend}, which counts nothing: the categories cannot be reconciled"]
    return []


def _cuda_available() -> bool:
    # The NVML-based check: the default one initialises the driver, after which forked children cannot use CUDA.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    original = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if original is None:
            del os.environ[variable]
        else:
            os.environ[variable] = original


def _check_cuda_build() -> None:
    if not native.HAS_CUDA:
        raise MemprofError("opacus-memprof was built without CUDA: see `opacus-memprof doctor`, or use the device cpu")
