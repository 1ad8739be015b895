# SPDX-License-Identifier: Apache-2.0
"""Replaces CUDA by the virtual GPU in this process."""

import ctypes
import sys
from dataclasses import dataclass, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.recording.after_import import AfterImport
from opacus_memprof.virtual_gpu import collectives, compilers, spawned_processes, wait_at_exit
from opacus_memprof.virtual_gpu.devices import Gpu, find_gpu
from opacus_memprof.virtual_gpu.requirements import LIBRARIES, check_machine

_DRIVER_VERSION = 13020
_MAX_DEVICES = 64  # torch and the event file cannot number more
_MAX_MEMORY = 2**40  # bytes of a device: all devices must fit into the address space of a process
_MIN_MEMORY = 2**28  # bytes of a device, in addition to its context


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
    """Gives this process virtual GPUs. Call it once, before torch is imported.

    Operations on small tensors compute real values (see `virtual_gpu.values`). Children that multiprocessing starts, by
    fork or spawn, have the same virtual GPUs; other programs that this process starts have none.

    Args:
        kind: a key of `GPUS`.
        memory: bytes of each GPU. Default: the kind's.
        count: the number of GPUs.

    Raises:
        MemprofError: the kind is unknown, the memory or the count is out of range, this process has virtual GPUs or has
            imported torch already, or a virtual GPU cannot work on this machine or with its torch.
    """
    global _active, _library
    gpu = choose_gpu(kind, memory, count)
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
    AfterImport("torch", _install_values)
    collectives.install(_library)
    compilers.configure(LIBRARIES)
    wait_at_exit.wait_for_threads_at_exit()
    spawned_processes.pass_to_children(kind, gpu.total_memory, count)
    return _active


def _install_values() -> None:
    try:
        from opacus_memprof.virtual_gpu import values  # loads torch

        values.install()
    except ImportError as error:
        raise MemprofError(str(error)) from None


def choose_gpu(kind: str, memory: int | None, count: int) -> Gpu:
    """The properties of the kind, with `memory` if it is not None. Raises MemprofError as `start` does."""
    gpu = find_gpu(kind)
    if not 1 <= count <= _MAX_DEVICES:
        raise MemprofError(f"a process cannot have {count} virtual GPUs: give a number from 1 to {_MAX_DEVICES}")
    if memory is None:
        return gpu
    smallest = gpu.context_memory + _MIN_MEMORY
    if not smallest <= memory <= _MAX_MEMORY:
        raise MemprofError(
            f"a virtual GPU cannot have {format_bytes(memory)}: give at least {format_bytes(smallest)}, of which a "
            f"CUDA context takes {format_bytes(gpu.context_memory)}, and at most {format_bytes(_MAX_MEMORY)}"
        )
    return replace(gpu, total_memory=memory)


def default_answers() -> dict[str, int]:
    """The number of calls of each CUDA function that the virtual GPU answers by a default. Those never called are left
    out."""
    if _library is None:
        return {}
    answer = _library.memprof_virtual_gpu_default
    answer.restype = ctypes.c_char_p
    answer.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64)]
    calls = ctypes.c_uint64()
    result: dict[str, int] = {}
    index = 0
    while (name := answer(index, ctypes.byref(calls))) is not None:
        if calls.value:
            result[name.decode()] = calls.value
        index += 1
    return result
