# SPDX-License-Identifier: Apache-2.0
"""Puts the virtual GPU in the place of CUDA in this process."""

import ctypes
import sys
from dataclasses import dataclass, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.imports import AfterImport
from opacus_memprof.units import format_bytes
from opacus_memprof.virtual_gpu import collectives, compilers, ending, spawning
from opacus_memprof.virtual_gpu.devices import GPUS, Gpu
from opacus_memprof.virtual_gpu.requirements import LIBRARIES, check_machine

_DRIVER_VERSION = 13020
_MOST_DEVICES = 64  # of a process that torch and the event file can number
_LARGEST_MEMORY = 2**40  # of a device: all of them together must find room in a process' addresses
_SMALLEST_MEMORY = 2**28  # beside what the context takes


@dataclass(frozen=True)
class VirtualGpu:
    """The virtual GPUs of this process: `count` of one kind."""

    kind: str
    gpu: Gpu
    count: int


_active: VirtualGpu | None = None
_library: ctypes.CDLL | None = None


def active() -> VirtualGpu | None:
    """The virtual GPUs of this process, or None."""
    return _active


def start(kind: str, *, memory: int | None = None, count: int = 1) -> VirtualGpu:
    """Gives this process `count` virtual GPUs; before torch is imported, and once.

    Args:
        kind: a name in `GPUS`.
        memory: bytes of each, in place of the kind's own.
        count: how many there are.

    Small tensors have true values from the program's import of torch on. Children that multiprocessing makes, by fork
    or spawn, have the same virtual GPUs. Other programs that this process starts have none.

    Raises:
        MemprofError: an unknown kind, a size or a number that makes no sense, this process has virtual GPUs or torch
            already, or a virtual GPU cannot work on this machine or with its torch.
    """
    global _active, _library
    gpu = _choose(kind, memory, count)
    if _active is not None:
        raise MemprofError(
            f"this process has virtual GPUs already ({_active.count} of {_active.kind}), and one cannot run inside "
            "another: start the program without the second one"
        )
    if "torch" in sys.modules:
        raise MemprofError(
            "torch is imported already, and a virtual GPU must be there before it: start it first, or use "
            "`opacus-memprof run --virtual-gpu`"
        )
    kernels = check_machine()
    _library = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(LIBRARIES / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    properties = gpu.as_structure(kernels)
    _library.memprof_virtual_gpu_start(ctypes.byref(properties), count, _DRIVER_VERSION)
    _active = VirtualGpu(kind, gpu, count)
    AfterImport("torch", _compute_small_values)
    collectives.install(_library)
    compilers.prepare(LIBRARIES)
    ending.wait_for_threads_at_exit()
    spawning.give_to_children(kind, gpu.total_memory, count)
    return _active


def _compute_small_values() -> None:
    try:
        from opacus_memprof.virtual_gpu import values  # loads torch

        values.install()
    except ImportError as error:
        raise MemprofError(str(error)) from None


def _choose(kind: str, memory: int | None, count: int) -> Gpu:
    """The kind's properties, with `memory` in place of its own."""
    gpu = GPUS.get(kind)
    if gpu is None:
        raise MemprofError(f'there is no virtual GPU "{kind}": use one of {", ".join(GPUS)}')
    if not 1 <= count <= _MOST_DEVICES:
        raise MemprofError(f"a process cannot have {count} virtual GPUs: give a number from 1 to {_MOST_DEVICES}")
    if memory is None:
        return gpu
    smallest = gpu.context_memory + _SMALLEST_MEMORY
    if not smallest <= memory <= _LARGEST_MEMORY:
        raise MemprofError(
            f"a virtual GPU cannot have {format_bytes(memory)}: give at least {format_bytes(smallest)}, of which a "
            f"CUDA context takes {format_bytes(gpu.context_memory)}, and at most {format_bytes(_LARGEST_MEMORY)}"
        )
    return replace(gpu, total_memory=memory)


def default_answers() -> dict[str, int]:
    """How often each symbol was called that the virtual GPU answers by a default, the called ones alone."""
    if _library is None:
        return {}
    answer = _library.memprof_virtual_gpu_default
    answer.restype = ctypes.c_char_p
    answer.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64)]
    calls = ctypes.c_uint64()
    found: dict[str, int] = {}
    index = 0
    while (name := answer(index, ctypes.byref(calls))) is not None:
        if calls.value:
            found[name.decode()] = calls.value
        index += 1
    return found
