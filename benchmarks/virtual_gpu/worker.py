# SPDX-License-Identifier: Apache-2.0
"""Runs one training of benchmarks/virtual_gpu/peaks.py in this process, on the real GPU or on a virtual one.

    python -m benchmarks.virtual_gpu.worker 'gpt hooks' --result FILE --profile DIR [--virtual h200 --memory BYTES]

Writes one JSON object to FILE: what the allocator counted, the categories at the peak, and the versions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpu.cases import Case, named

STARTED = time.perf_counter()
PEAKS = {
    "requested": "requested_bytes.all.peak",
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}


def start_virtual(kind: str, memory: int | None, ranks: int) -> None:
    """Gives this process its virtual GPUs; before torch is imported."""
    from opacus_memprof import virtual_gpu

    virtual_gpu.start(kind, memory=memory, count=ranks)


def join(case: Case) -> int:
    """The process group of a distributed training, with one member where nobody has started more; returns the rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", 0))
    torch.cuda.set_device(rank)
    if case.ranks == 1:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    return rank


def environment(virtual: bool) -> dict[str, Any]:
    import opacus
    import torch

    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "gpu": properties.name,
        "total_memory": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": ".".join(map(str, torch._C._cudnn.getRuntimeVersion())),
        "opacus": opacus.__version__,
        "python": platform.python_version(),
    }
    if not virtual and (tool := shutil.which("nvidia-smi")):
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    return found


def allocations(directory: Path) -> list[tuple[str, int, int]]:
    """What was allocated on the GPU: op, bytes and how often; for a look at where two runs differ."""
    import numpy as np

    from opacus_memprof.analysis.events import ALLOC, Events

    events, counts = Events(directory), Counter[tuple[str, int]]()

    def take(rows: Any) -> None:
        made = rows[(rows["kind"] == ALLOC) & (rows["device"] > 0)]
        keys, times = np.unique(made[["op", "bytes"]], return_counts=True)
        for key, count in zip(keys.tolist(), times.tolist(), strict=True):
            counts[events.names.op(key[0]), key[1]] += count

    events.for_each_chunk(take)
    return [(op, size, count) for (op, size), count in counts.items()]


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Trains under a session and returns what was counted."""
    import torch

    import opacus_memprof
    from benchmarks.virtual_gpu.training import train

    torch.cuda.init()
    result = environment(bool(args.virtual))
    free, total = torch.cuda.mem_get_info()
    result["context"] = total - free
    if args.fraction:
        torch.cuda.set_per_process_memory_fraction(args.fraction)
    rank = join(case) if case.wrap else 0
    result["import_s"] = round(time.perf_counter() - STARTED, 2)
    begun = time.perf_counter()
    torch.cuda.memory._record_memory_history(context=None)
    with opacus_memprof.profile(args.profile, device="cuda", max_events=2_000_000) as session:
        train(case, torch.device("cuda", rank), session)
        torch.cuda.synchronize()
        result["train_s"] = round(time.perf_counter() - begun, 2)
        counted = torch.cuda.memory_stats()
        segments = Counter(segment["total_size"] for segment in torch.cuda.memory_snapshot())
        trace = torch.cuda.memory._snapshot()["device_traces"][rank]
    result |= {name: counted[key] for name, key in PEAKS.items()}
    result["cache_flushes"] = counted["num_alloc_retries"]
    result["segments"] = sorted(segments.items())
    made = [entry for entry in trace if entry["action"].startswith("segment")]
    result["segment_history"] = [[entry["action"][8:], entry["size"], entry["addr"]] for entry in made]
    device = session.result["devices"][f"cuda:{rank}"]
    result["categories"] = {name: size for name, size in device["peak"]["categories"].items() if size}
    result["peak_phase"] = device["peak"]["phase"]
    with gzip.open(f"{args.result}.allocations.gz", "wt") as file:
        json.dump(allocations(session.directory), file)
    if args.virtual:
        from opacus_memprof import virtual_gpu

        result["default_answers"] = virtual_gpu.default_answers()
    return result


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=named, metavar="CASE")
    parser.add_argument("--result", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--virtual", metavar="KIND", help="a virtual GPU, instead of the one that is there")
    parser.add_argument("--memory", type=int, help="bytes of the virtual GPU")
    parser.add_argument("--fraction", type=float, help="of the GPU's memory that the training may use")
    return parser


def main() -> None:
    args = arguments().parse_args()
    case: Case = args.case
    if case.settings:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case.settings  # before torch reads it
    warnings.simplefilter("ignore")
    if args.virtual:
        start_virtual(args.virtual, args.memory, case.ranks)
    try:
        result = {"ok": True, **run(case, args)}
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        out_of_memory = type(error).__name__ == "OutOfMemoryError"
        result = {"ok": False, "out_of_memory": out_of_memory, "error": lines[0][:300]}
        traceback.print_exc()
    result["wall_s"] = round(time.perf_counter() - STARTED, 2)
    Path(args.result).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result["ok"] else 1)  # what a compiler's or a process group's threads still do is of no interest


if __name__ == "__main__":
    main()
