# SPDX-License-Identifier: Apache-2.0
"""Bytes that the norm step moves: counted from shapes, and for one layer checked with Nsight Compute.

    python -m benchmarks.clipping.memory_traffic --check        # needs ncu and a GPU whose counters may be read

The check runs the norm step of one linear layer under ncu, by Opacus' ghost clipping and by flash_clip, and prints
the device memory traffic of its kernels beside the count. Caches make the measured traffic smaller than the count
where tiles are read again.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.clipping.models import Config
from opacus_memprof.clipping.cost import choose, ghost_norm_cost

METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"


def counted_bytes(config: Config) -> dict[str, int]:
    """{"flash_clip", "ghost"}: over the linear layers of the model; their shapes are read without running it."""
    ours = ghost = 0
    with torch.device("meta"):
        model = config.build()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and config.tokens:
            rows, columns = module.weight.shape
            bias = module.bias is not None and module.bias.requires_grad
            sizes = (config.batch, config.tokens, rows, columns, config.dtype.itemsize)
            ours += choose(*sizes).norm_cost.bytes
            ghost += ghost_norm_cost(*sizes, bias=bias).bytes
    return {"flash_clip": ours, "ghost": ghost}


def norm_step(how: str, batch: int, tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Runs only the norm step between two profiler marks; what is kept exists before."""
    from opacus.grad_sample.linear import compute_linear_norm_sample

    from opacus_memprof.clipping.kernels.norms import squared_norms
    from opacus_memprof.clipping.layers import LAYERS
    from opacus_memprof.clipping.workspace import Workspace

    torch.set_float32_matmul_precision("high")
    layer = nn.Linear(columns, rows, device="cuda", dtype=dtype)
    x = torch.randn(batch, tokens, columns, device="cuda", dtype=dtype)
    g = torch.randn(batch, tokens, rows, device="cuda", dtype=dtype)
    entry = LAYERS[nn.Linear]("layer", layer)
    workspace = Workspace.from_mib(256)
    choice = entry.choose(x, g, keep=True)
    assert choice is not None
    stack = entry.weight_gradients(x, g, workspace) if choice.keep == "gradient" else None
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        if how == "ghost":
            compute_linear_norm_sample(layer, [x], g)
        elif stack is not None:
            squared_norms(stack)
        else:
            entry.weight_squared_norms(x, g, choice, workspace)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def measured_bytes(how: str, sizes: list[str]) -> int:
    """Device memory traffic of one norm step, by ncu."""
    command = ["ncu", "--profile-from-start", "off", "--metrics", METRICS, "--csv", "--print-units", "base"]
    command += [sys.executable, "-m", "benchmarks.clipping.memory_traffic", "--step", how, *sizes]
    run = subprocess.run(command, capture_output=True, text=True)
    table = run.stdout[run.stdout.find('"ID"') :]
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(table)))
    if not rows:
        raise SystemExit(f"ncu measured nothing: {(run.stderr or run.stdout).strip().splitlines()[-1:]}")
    return sum(int(float(row["Metric Value"].replace(",", ""))) for row in rows) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--step", choices=["ghost", "flash_clip"], help=argparse.SUPPRESS)
    parser.add_argument("sizes", nargs="*", help="batch tokens rows columns float32|bfloat16")
    arguments = parser.parse_args()
    if arguments.step:
        batch, tokens, rows, columns = map(int, arguments.sizes[:4])
        norm_step(arguments.step, batch, tokens, rows, columns, getattr(torch, arguments.sizes[4]))
        return
    if not arguments.check:
        parser.error("give --check")
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not installed; it comes with the CUDA toolkit (cuda-nsight-compute)")
    for sizes in ["1 16384 8192 2048 float32", "16 512 8192 2048 float32", "8 2048 2048 2048 bfloat16"]:
        batch, tokens, rows, columns = map(int, sizes.split()[:4])
        itemsize = getattr(torch, sizes.split()[4]).itemsize
        counts = {
            "ghost": ghost_norm_cost(batch, tokens, rows, columns, itemsize, bias=True).bytes,
            "flash_clip": choose(batch, tokens, rows, columns, itemsize).norm_cost.bytes,
        }
        for how, count in counts.items():
            measured = measured_bytes(how, sizes.split())
            print(f"{sizes:<32}{how:<12} counted {count / 1e9:8.3f} GB, measured {measured / 1e9:8.3f} GB", flush=True)


if __name__ == "__main__":
    main()
