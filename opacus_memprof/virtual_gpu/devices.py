# SPDX-License-Identifier: Apache-2.0
"""The GPUs that can be played, and their properties."""

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Bytes and kHz, as CUDA reports them."""

    name: str
    total_memory: int
    context_memory: int
    major: int
    minor: int
    kernel_architecture: int
    multiprocessors: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    l2_cache: int
    memory_bus_bits: int
    clock_khz: int
    memory_clock_khz: int


GPUS = {
    "h200": Gpu(
        name="NVIDIA H200",
        total_memory=150109880320,
        context_memory=500 << 20,
        major=9,
        minor=0,
        kernel_architecture=90,
        multiprocessors=132,
        threads_per_multiprocessor=2048,
        blocks_per_multiprocessor=32,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        l2_cache=62914560,
        memory_bus_bits=6144,
        clock_khz=1980000,
        memory_clock_khz=3201000,
    ),
}


class DeviceProperties(ctypes.Structure):
    """csrc/virtual_gpu/device.h: the same fields in the same order."""

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
