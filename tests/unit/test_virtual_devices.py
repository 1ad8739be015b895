# SPDX-License-Identifier: Apache-2.0
"""The table of virtual GPUs agrees with NVIDIA's data sheets and programming guide, and with torch's view of one."""

import subprocess
import sys

import pytest
import torch

from opacus_memprof.virtual_gpu.devices import GPUS, LIMITS
from opacus_memprof.virtual_gpu.requirements import LIBRARIES, check_machine

# From NVIDIA's data sheets: the label's GiB, GB/s of memory, TFLOP/s of float32 outside tensor cores.
SHEETS = {
    "t4": (16, 320, 8.1),
    "v100": (32, 900, 15.7),
    "v100-16": (16, 900, 15.7),
    "a100-40": (40, 1555, 19.5),
    "a100-80": (80, 2039, 19.5),
    "a10": (24, 600, 31.2),
    "a6000": (48, 768, 38.7),
    "l4": (24, 300, 30.3),
    "l40": (48, 864, 90.5),
    "l40s": (48, 864, 91.6),
    "rtx3090": (24, 936, 35.6),
    "rtx4090": (24, 1008, 82.6),
    "rtx5090": (32, 1792, 104.8),
    "rtxpro6000": (96, 1792, 125),
    "h100": (80, 3350, 67),
    "gh200": (96, 4000, 67),
    "h200": (141, 4800, 67),
    "b200": (180, 8000, 75),
    "b300": (270, 8000, 75),
}

# From the CUDA C++ Programming Guide: resident threads and blocks of a multiprocessor, and its KB of shared memory.
GUIDE = {
    (7, 0): (2048, 32, 96),
    (7, 5): (1024, 16, 64),
    (8, 0): (2048, 32, 164),
    (8, 6): (1536, 16, 100),
    (8, 9): (1536, 24, 100),
    (9, 0): (2048, 32, 228),
    (10, 0): (2048, 32, 228),
    (10, 3): (2048, 32, 228),
    (12, 0): (1536, 24, 100),
}


def cores(capability: tuple[int, int]) -> int:
    """Of float32, in a multiprocessor."""
    return 64 if capability <= (8, 0) else 128


@pytest.mark.parametrize("kind", GPUS)
def test_a_gpu_is_that_of_its_data_sheet(kind: str) -> None:
    gpu, (gib, bandwidth, teraflops) = GPUS[kind], SHEETS[kind]
    assert 0.9 < gpu.total_memory / (gib << 30) < 1
    assert gpu.total_memory % (64 << 10) == 0
    assert gpu.memory_bus_bits / 8 * gpu.memory_clock_khz * 2 / 1e6 == pytest.approx(bandwidth, rel=0.05)
    assert gpu.multiprocessors * cores(gpu.capability) * 2 * gpu.clock_khz / 1e9 == pytest.approx(teraflops, rel=0.01)


@pytest.mark.parametrize("capability", LIMITS)
def test_a_capability_has_the_guides_limits(capability: tuple[int, int]) -> None:
    limits, (threads, blocks, shared) = LIMITS[capability], GUIDE[capability]
    assert (limits.threads_per_multiprocessor, limits.blocks_per_multiprocessor) == (threads, blocks)
    assert limits.shared_memory_per_multiprocessor == shared * 1024
    reserved = 1024 if capability >= (8, 0) else 0  # the system keeps 1 KB of every block
    assert limits.shared_memory_per_block_optin == shared * 1024 - reserved


# Of wheels for CUDA 13, and of those for CUDA 12.6.
@pytest.mark.parametrize("kernels", [(75, 80, 86, 90, 100, 120), (50, 60, 70, 75, 80, 86, 90)])
@pytest.mark.parametrize("kind", GPUS)
def test_kernels_are_the_newest_of_torchs_that_run_there(kind: str, kernels: tuple[int, ...]) -> None:
    gpu = GPUS[kind]
    own = 10 * gpu.major + gpu.minor
    running = [kernel for kernel in kernels if kernel // 10 == own // 10 and kernel <= own]
    expected = max(running) if running else min(kernels)  # a V100 with CUDA 13, a B200 with 12.6
    assert gpu.kernel_architecture(kernels) == expected
    assert gpu.kernel_architecture([]) == own


@pytest.mark.skipif(not LIBRARIES.is_dir(), reason="built without the virtual GPU")
def test_the_build_has_found_torchs_kernels() -> None:
    listed = (torch._C._cuda_getArchFlags() or "").split()
    built = [int(name.removeprefix("sm_")) for name in listed if name.startswith("sm_")]
    assert check_machine() == built != []


@pytest.mark.skipif(not LIBRARIES.is_dir(), reason="built without the virtual GPU")
def test_torch_sees_the_tables_gpu() -> None:
    """An A100, whose properties torch prints on the real one as written out here."""
    program = """
from opacus_memprof import virtual_gpu
virtual_gpu.start("a100-40")
import torch
p = torch.cuda.get_device_properties(0)
print(p.name, p.major, p.minor, p.multi_processor_count, p.total_memory, p.L2_cache_size, sep="|")
print(p.max_threads_per_multi_processor, p.shared_memory_per_multiprocessor, p.shared_memory_per_block_optin, sep="|")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "NVIDIA A100-SXM4-40GB|8|0|108|42298834944|41943040"
    assert second == "2048|167936|166912"
