# SPDX-License-Identifier: Apache-2.0
"""Measures on a GPU what the virtual GPU keeps as constants: what CUDA and its libraries take beside torch's allocator.

    python -m benchmarks.virtual_gpu.constants > constants.json

Nothing else may use the GPU while it runs: cudaMemGetInfo sees everybody. All figures are bytes. Each group is a
process of its own, since a context and a library's handle cannot be undone.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20


CUDA = ctypes.CDLL(None)  # torch loads CUDA's runtime for everybody


def free(device: int = 0) -> int:
    """What cudaMemGetInfo says is free."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def outside(before: int, device: int = 0) -> int:
    """What was taken since `before`, torch's own segments left out."""
    return before - free(device) - torch.cuda.memory_reserved(device)


def context() -> dict[str, Any]:
    """What a context takes (NVML is asked before there is one), and then each library at its first call."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    nvml.nvmlInit_v2()
    device = ctypes.c_void_p()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    nvml.nvmlDeviceGetHandleByIndex_v2(int(visible) if visible.isdigit() else 0, ctypes.byref(device))
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    nvml.nvmlDeviceGetMemoryInfo(device, memory)
    idle = memory[1]
    total = torch.cuda.mem_get_info()[1]
    start = free()
    found: dict[str, Any] = {"total": total, "nvml_total": memory[0], "nvml_free_before": idle, "context": idle - start}
    steps: dict[str, Callable[[], object]] = {
        "first_kernel": lambda: torch.ones(1, device="cuda") + 1,
        "matmul_float32": lambda: torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda"),
        "matmul_bfloat16": lambda: (
            torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
            @ torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        ),
        "linear_with_bias": lambda: torch.nn.Linear(256, 256).cuda()(torch.ones(8, 256, device="cuda")),
        "convolution": lambda: (
            torch.nn.Conv2d(16, 16, 3).cuda()(torch.ones(2, 16, 32, 32, device="cuda")).sum().backward()
        ),
        "lstm": lambda: torch.nn.LSTM(16, 16).cuda()(torch.ones(4, 2, 16, device="cuda"))[0].sum().backward(),
        "inverse": lambda: torch.linalg.inv(torch.eye(64, device="cuda")),
        "fft": lambda: torch.fft.fft(torch.ones(64, 64, device="cuda")),
        "sparse": lambda: torch.sparse.mm(torch.eye(64, device="cuda").to_sparse(), torch.ones(64, 64, device="cuda")),
        "second_stream": lambda: torch.cuda.Stream().synchronize(),
    }
    for name, step in steps.items():
        before = outside(start)
        step()
        found[name] = outside(start) - before
    return found


def cuda_malloc() -> dict[str, Any]:
    """How cudaMalloc rounds: what the first of several blocks takes, and all of them together."""
    free()
    found: dict[str, Any] = {}
    for size in (1, 512 * 1024, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 20 * MIB, 100 * MIB + 1):
        before, blocks, taken = free(), [], []
        for _ in range(8):
            address = ctypes.c_void_p()
            if CUDA.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) != 0:
                raise RuntimeError(f"cudaMalloc of {size} bytes failed")
            blocks.append(address)
            taken.append(before - free())
        for address in blocks:
            CUDA.cudaFree(address)
        found[str(size)] = {"first": taken[0], "all_8": taken[-1], "kept_after_free": before - free()}
    return found


def cuda_malloc_async() -> list[dict[str, Any]]:
    """How the pool of cudaMallocAsync grows and shrinks: [operation, used, reserved, taken of the device]."""
    free()
    pool = ctypes.c_void_p()
    CUDA.cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    threshold = ctypes.c_uint64(2**64 - 1)
    CUDA.cudaMemPoolSetAttribute(pool, 4, ctypes.byref(threshold))  # cudaMemPoolAttrReleaseThreshold, as torch sets it
    start, blocks, rows = free(), {}, []

    def figure(attribute: int) -> int:
        value = ctypes.c_uint64()
        CUDA.cudaMemPoolGetAttribute(pool, attribute, ctypes.byref(value))
        return value.value

    def note(operation: str) -> None:
        torch.cuda.synchronize()
        # cudaMemPoolAttrUsedMemCurrent and cudaMemPoolAttrReservedMemCurrent
        rows.append({"operation": operation, "used": figure(7), "reserved": figure(5), "taken": start - free()})

    for operation in (
        "1", "+1000", "+1048576", "+30 MiB", "+33 MiB", "+100 MiB", "-100 MiB", "+64 MiB", "-33 MiB", "-30 MiB",
        "+60 MiB", "+333 MiB", "-64 MiB", "-333 MiB", "+400 MiB", "trim", "-400 MiB", "-60 MiB", "trim",
    ):  # fmt: skip
        size = operation.lstrip("+-")
        if operation == "trim":
            CUDA.cudaMemPoolTrimTo(pool, ctypes.c_size_t(0))
        elif operation.startswith("-"):
            CUDA.cudaFreeAsync(blocks.pop(size), None)
        else:
            number, _, unit = size.partition(" ")
            address = ctypes.c_void_p()
            CUDA.cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(int(number) * (MIB if unit else 1)), None)
            blocks[size] = address
        note(operation)
    return rows


def expandable_segments() -> dict[str, Any]:
    """What the driver's allocations (cuMemCreate) take of the device beside their size."""
    before = free()
    block = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    return {"reserved": torch.cuda.memory_reserved(), "taken": before - free(), "allocated": block.numel()}


def graphs() -> dict[str, Any]:
    """What a captured CUDA graph takes outside of torch's memory, for some numbers of kernels."""
    found: dict[str, Any] = {}
    x = torch.ones(1024, device="cuda")
    for kernels in (1, 100, 1000, 5000):
        start = free() + torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(kernels):
                x.add_(1)
        graph.replay()
        found[str(kernels)] = outside(start)
        del graph
    return found


def nccl() -> dict[str, Any]:
    """What NCCL's communicator of two GPUs takes of the first: made, and after some collectives."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    command = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__, "nccl-rank"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def nccl_rank() -> dict[str, Any]:
    """One of the two processes of `nccl`."""
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    start = free(rank) + torch.cuda.memory_reserved(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found: dict[str, Any] = {"made": outside(start, rank)}
    for size in (1, 64 * MIB):
        x = torch.ones(size, device="cuda")
        dist.all_reduce(x)
        found[f"all_reduce_{4 * size}"] = outside(start, rank)
        dist.all_gather_into_tensor(torch.empty(2 * size, device="cuda"), x)
        found[f"all_gather_{4 * size}"] = outside(start, rank)
        dist.reduce_scatter_tensor(torch.empty(size, device="cuda"), torch.ones(2 * size, device="cuda"))
        found[f"reduce_scatter_{4 * size}"] = outside(start, rank)
    dist.new_group([0, 1])
    found["second_group"] = outside(start, rank)
    dist.destroy_process_group()
    return found if rank == 0 else {}


GROUPS: dict[str, Callable[[], Any]] = {
    "context": context,
    "cuda_malloc": cuda_malloc,
    "cuda_malloc_async": cuda_malloc_async,
    "expandable_segments": expandable_segments,
    "graphs": graphs,
    "nccl": nccl,
}


def main() -> None:
    if len(sys.argv) > 1:
        found = nccl_rank() if sys.argv[1] == "nccl-rank" else GROUPS[sys.argv[1]]()
        if found:
            print(json.dumps(found), flush=True)
        return
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "gpu": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n")[0]
        if Path("/proc/driver/nvidia/version").exists()
        else None,
    }
    for name in GROUPS:
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if name == "expandable_segments" else {}
        done = subprocess.run(
            [sys.executable, __file__, name], capture_output=True, text=True, env=os.environ | settings, check=False
        )
        printed = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
        result[name] = json.loads(printed[-1]) if printed else {"failed": done.stderr[-2000:]}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
