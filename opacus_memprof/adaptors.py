# SPDX-License-Identifier: Apache-2.0
"""Puts the recording allocator in the place of torch's own, and back.

It delegates every call to the allocator it stands for and notes what passes, so the training run is the same with it
as without. Sources: csrc/adaptors/cuda_adaptor.cpp, csrc/adaptors/cpu_adaptor.cpp.
"""

import importlib.util
import os
from typing import Any

import torch

from opacus_memprof import _native
from opacus_memprof.errors import MemprofError


class Allocator:
    """What `torch.cuda.memory.change_current_allocator` asks for."""

    def allocator(self) -> Any:
        """The `torch._C._cuda_CUDAAllocator` that delegates to torch's caching allocator."""
        return _native.cuda_allocator()


def allocator() -> Allocator:
    """The recording CUDA allocator, for `torch.cuda.memory.change_current_allocator(opacus_memprof.allocator())`.

    Torch takes it only before CUDA is initialised; `install` works at any time.

    Raises:
        MemprofError: the extension was built without CUDA.
    """
    _need_cuda_build()
    return Allocator()


def install(device: str = "auto") -> None:
    """Starts recording allocations of `device` ("auto", "cuda" or "cpu"), also after CUDA is initialised.

    Blocks that are there already count as `unattributed` until they are freed or attached. Again is harmless.

    Raises:
        MemprofError: unknown device, no GPU, an extension that was built without CUDA, or another allocator in place
            than the one that is stood for already.
    """
    try:
        if resolve_device(device) == "cpu":
            _native.cpu_install()
        else:
            _native.cuda_install()
    except RuntimeError as error:
        raise MemprofError(str(error)) from error


def uninstall() -> None:
    """Gives torch its own allocators back. Again is harmless; tensors that are alive stay valid."""
    remove("cpu")
    if _native.HAS_CUDA:
        remove("cuda")


def remove(device: str) -> None:
    """Gives torch its own allocator of `device` ("cuda" or "cpu") back, where ours is the current one."""
    if device == "cpu":
        _native.cpu_uninstall()
    else:
        _native.cuda_uninstall()


def library_path() -> str:
    """The library for `torch.cuda.memory.CUDAPluggableAllocator(path, "opacus_memprof_malloc", "opacus_memprof_free")`.

    A fallback that loses what torch's caching allocator gives; the README says what.

    Raises:
        MemprofError: the extension was built without CUDA.
    """
    _need_cuda_build()
    spec = importlib.util.find_spec("opacus_memprof._C")
    assert spec is not None  # _native has loaded it
    assert spec.origin is not None
    return spec.origin


def resolve_device(device: str) -> str:
    """ "cuda" or "cpu" for "auto", "cuda" or "cpu". Never initialises CUDA."""
    if device not in ("auto", "cuda", "cpu"):
        raise MemprofError(f'there is no device "{device}": use auto, cuda or cpu')
    if device == "cpu" or (device == "auto" and not _cuda_available()):
        return "cpu"
    _need_cuda_build()
    if not _cuda_available():
        raise MemprofError("torch finds no CUDA device here: use the device cpu, or see `opacus-memprof doctor`")
    return "cuda"


def installed(device: str) -> bool:
    """Whether the recording allocator of `device` ("cuda" or "cpu") is the current one."""
    return _native.cpu_installed() if device == "cpu" else _native.cuda_installed()


def _cuda_available() -> bool:
    # Asked through NVML: the usual check starts the driver, after which a forked child cannot use CUDA.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _need_cuda_build() -> None:
    if not _native.HAS_CUDA:
        raise MemprofError("opacus-memprof was built without CUDA: see `opacus-memprof doctor`, or use the device cpu")
