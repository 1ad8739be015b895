# SPDX-License-Identifier: Apache-2.0
"""The kinds of virtual GPUs, and their properties.

Sources of the figures:

- `Limits`: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". 7.0 is in the guides up to
  CUDA 12.9.
- multiprocessors, L2 cache, bus and clocks: published output of CUDA's `deviceQuery` on that GPU. For the B200:
  `cudaGetDeviceProperties` and nvidia-smi (https://github.com/pytorch/ao/pull/4002).
- total_memory: `torch.cuda.get_device_properties(0).total_memory`, which `deviceQuery` also prints. It is slightly less
  than the name says, because ECC and the driver reserve some, and differs by up to 0.4 % between drivers. The comment
  of each row names the driver by the CUDA version that it supports.
- context_memory: measured on the H200 only; see `Gpu.context_memory`.

The H200's row was read from `torch.cuda.get_device_properties` on a real one.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from opacus_memprof.errors import MemprofError


@dataclass(frozen=True)
class Limits:
    """The limits of a compute capability. Shared memory is in bytes."""

    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int


_KIB = 1024
LIMITS = {
    (7, 0): Limits(2048, 32, 96 * _KIB, 96 * _KIB),
    (7, 5): Limits(1024, 16, 64 * _KIB, 64 * _KIB),
    (8, 0): Limits(2048, 32, 164 * _KIB, 163 * _KIB),
    (8, 6): Limits(1536, 16, 100 * _KIB, 99 * _KIB),
    (8, 9): Limits(1536, 24, 100 * _KIB, 99 * _KIB),
    (9, 0): Limits(2048, 32, 228 * _KIB, 227 * _KIB),
    (10, 0): Limits(2048, 32, 228 * _KIB, 227 * _KIB),
    (10, 3): Limits(2048, 32, 228 * _KIB, 227 * _KIB),
    (12, 0): Limits(1536, 24, 100 * _KIB, 99 * _KIB),
}

# The memory of a CUDA context on an H200, in bytes, and the threads that can be resident there.
_CONTEXT_OF_H200 = 552468480
_THREADS_OF_H200 = 132 * 2048


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. Sizes are in bytes, clocks in kHz, as CUDA reports them.

    Attributes:
        capability: the compute capability, major and minor.
    """

    name: str
    total_memory: int
    capability: tuple[int, int]
    multiprocessors: int
    l2_cache: int
    memory_bus_bits: int
    clock_khz: int
    memory_clock_khz: int

    @property
    def major(self) -> int:
        return self.capability[0]

    @property
    def minor(self) -> int:
        return self.capability[1]

    def kernel_architecture(self, kernels: Sequence[int]) -> int:
        """Returns the architecture, such as 90, of the kernels that torch runs on this GPU.

        This is the newest architecture of the GPU's major version that is not newer than the GPU. If a real GPU of this
        kind could not run any of the kernels, it is the oldest one.

        Args:
            kernels: the architectures for which torch has kernels.
        """
        capability = 10 * self.major + self.minor
        runnable = [kernel for kernel in kernels if kernel // 10 == self.major and kernel <= capability]
        return max(runnable, default=min(kernels, default=capability))

    @property
    def context_memory(self) -> int:
        """The bytes that a CUDA context uses before the first allocation.

        Measured on the H200. For other kinds it is scaled by the number of resident threads, because most of it is
        their local memory.
        """
        threads = self.multiprocessors * LIMITS[self.capability].threads_per_multiprocessor
        return _CONTEXT_OF_H200 * threads // _THREADS_OF_H200

    def as_structure(self, kernels: Sequence[int]) -> "DeviceProperties":
        """Returns the properties as a struct for csrc/virtual_gpu.

        `kernels` lists the architectures for which torch has kernels.
        """
        limits = LIMITS[self.capability]
        return DeviceProperties(
            name=self.name.encode(),
            total_memory=self.total_memory,
            context_memory=self.context_memory,
            major=self.major,
            minor=self.minor,
            kernel_architecture=self.kernel_architecture(kernels),
            multiprocessors=self.multiprocessors,
            threads_per_multiprocessor=limits.threads_per_multiprocessor,
            blocks_per_multiprocessor=limits.blocks_per_multiprocessor,
            shared_memory_per_block_optin=limits.shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=limits.shared_memory_per_multiprocessor,
            l2_cache=self.l2_cache,
            memory_bus_bits=self.memory_bus_bits,
            clock_khz=self.clock_khz,
            memory_clock_khz=self.memory_clock_khz,
        )


# fmt: off
GPUS = {
    # kind, name, total memory, capability, multiprocessors, L2 cache, bus, clock, memory clock
    "t4": Gpu("Tesla T4", 15843721216, (7, 5), 40, 4194304, 256, 1590000, 5001000),  # 11.0
    "v100": Gpu("Tesla V100-SXM2-32GB", 34089926656, (7, 0), 80, 6291456, 4096, 1530000, 877000),  # 11.6
    "v100-16": Gpu("Tesla V100-SXM2-16GB", 16928342016, (7, 0), 80, 6291456, 4096, 1530000, 877000),  # 12.4
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 42298834944, (8, 0), 108, 41943040, 5120, 1410000, 1215000),  # 12.2
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", 85100068864, (8, 0), 108, 41943040, 5120, 1410000, 1593000),  # 12.5
    "a10": Gpu("NVIDIA A10", 23609475072, (8, 6), 72, 6291456, 384, 1695000, 6251000),  # 12.2
    "a6000": Gpu("NVIDIA RTX A6000", 51160023040, (8, 6), 84, 6291456, 384, 1800000, 8001000),  # 12.7
    "l4": Gpu("NVIDIA L4", 23612293120, (8, 9), 58, 50331648, 192, 2040000, 6251000),  # 12.0
    # nvidia-smi says 46068 MiB of this one and of the L40S
    "l40": Gpu("NVIDIA L40", 47803596800, (8, 9), 142, 100663296, 384, 2490000, 9001000),
    "l40s": Gpu("NVIDIA L40S", 47803596800, (8, 9), 142, 100663296, 384, 2520000, 9001000),  # 12.4
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", 25414860800, (8, 6), 82, 6291456, 384, 1695000, 9751000),  # 12.2
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 25250627584, (8, 9), 128, 75497472, 384, 2520000, 10501000),  # 13.0
    # https://github.com/NVIDIA/nccl/issues/1637, whose card has another clock than NVIDIA's own
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", 33680457728, (12, 0), 170, 100663296, 512, 2407000, 14001000),  # 12.8
    # torch prints 97250 MB of 2^20 bytes (13.0); the rest is from NVIDIA's white paper on this GPU
    "rtxpro6000": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        97250 << 20, (12, 0), 188, 134217728, 512, 2617000, 14001000,
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 85017755648, (9, 0), 132, 52428800, 5120, 1980000, 2619000),  # 13.0
    "gh200": Gpu("NVIDIA GH200 480GB", 102005473280, (9, 0), 132, 62914560, 6144, 1980000, 2619000),  # 12.2
    "h200": Gpu("NVIDIA H200", 150109880320, (9, 0), 132, 62914560, 6016, 1980000, 3201000),  # 13.0
    # torch prints 182631 MB of 2^20 bytes (12.8); the clock is estimated
    "b200": Gpu("NVIDIA B200", 182631 << 20, (10, 0), 148, 132644864, 7680, 1965000, 3996000),
    # torch says 267.69 GiB when memory runs out (13.0); the rest is the B200's
    "b300": Gpu("NVIDIA B300 SXM6 AC", 274115 << 20, (10, 3), 148, 132644864, 7680, 1965000, 3996000),
}
# fmt: on


def find_gpu(kind: str) -> Gpu:
    """Returns the GPU of a kind. Raises MemprofError if there is none."""
    if kind.lower().startswith(("mi1", "mi2", "mi3", "mi4", "rx")):
        raise MemprofError(
            f'"{kind}" is a GPU of AMD, and virtual GPUs are of NVIDIA, whose libraries allocate other sizes: '
            f"use one of {', '.join(GPUS)}"
        )
    if kind not in GPUS:
        raise MemprofError(f'there is no virtual GPU "{kind}": use one of {", ".join(GPUS)}')
    return GPUS[kind]


class DeviceProperties(ctypes.Structure):
    """The struct of csrc/virtual_gpu/machine/device.h, with the same fields in the same order."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("total_memory", ctypes.c_uint64),
        ("context_memory", ctypes.c_uint64),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("kernel_architecture", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("threads_per_multiprocessor", ctypes.c_int32),
        ("blocks_per_multiprocessor", ctypes.c_int32),
        ("shared_memory_per_block_optin", ctypes.c_int32),
        ("shared_memory_per_multiprocessor", ctypes.c_int32),
        ("l2_cache", ctypes.c_int32),
        ("memory_bus_bits", ctypes.c_int32),
        ("clock_khz", ctypes.c_int32),
        ("memory_clock_khz", ctypes.c_int32),
    )
