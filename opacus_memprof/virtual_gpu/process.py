# SPDX-License-Identifier: Apache-2.0
"""Puts the virtual GPU in the place of CUDA in this process."""

import ctypes
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from opacus_memprof.errors import MemprofError
from opacus_memprof.virtual_gpu.devices import GPUS, DeviceProperties, Gpu

LIBRARIES = Path(__file__).with_name("lib")
_DRIVER_VERSION = 13020


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

    Raises:
        MemprofError: an unknown kind, torch is imported already, or the libraries have not been built.
    """
    global _active, _library
    if kind not in GPUS:
        raise MemprofError(f'there is no virtual GPU "{kind}": use one of {", ".join(GPUS)}')
    if "torch" in sys.modules:
        raise MemprofError("a virtual GPU must be there before torch is imported")
    gpu = GPUS[kind]
    if memory is not None:
        gpu = replace(gpu, total_memory=memory)
    _library = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(LIBRARIES / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    properties = DeviceProperties(**(asdict(gpu) | {"name": gpu.name.encode()}))
    _library.memprof_virtual_gpu_start(ctypes.byref(properties), count, _DRIVER_VERSION)
    _active = VirtualGpu(kind, gpu, count)
    return _active


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
