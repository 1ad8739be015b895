# SPDX-License-Identifier: Apache-2.0
"""A run in several processes, over which FSDP2 shards the model: what each does, and what becomes of their results."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn

from opacus_memprof.analysis.job_directory import load_ranks
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.files import read_json, write_json

# What says most of a run of several processes, first.
_TELLING = ("out_of_memory", "failed", "killed", "finished")


def join(device: str) -> torch.device:
    """Waits for the other processes; returns this one's device. Raises what torch.distributed raises."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if own.index >= torch.cuda.device_count():
        raise MemprofError(f"there are {torch.cuda.device_count()} GPUs: use at most as many processes")
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return own


def shard(model: nn.Module) -> Any:
    """The model with every layer sharded by itself, as Opacus needs it."""
    return FSDP2Wrapper(model)


def leave() -> None:
    """After a failure of one process the others must not be waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()


def result_file(name: str) -> str:
    """Where this process leaves its result: `result.json`, and of all ranks but the first `result_1.json` …"""
    rank = int(os.environ.get("RANK", "0"))
    return name if rank == 0 else f"{Path(name).stem}_{rank}.json"


def together(directory: Path, results: str, profile: Path) -> None:
    """Leaves in the file `results` what the rank has left that says most, with `ranks`, the summary of all
    (docs/format.md); nothing where no rank has left a result."""
    left = {path: read_json(path) for path in sorted(directory.glob(f"{Path(results).stem}*.json"))}
    if not left:
        return
    telling = min(left.values(), key=lambda result: _TELLING.index(result["status"]))
    try:
        ranks = load_ranks(profile)
    except MemprofError:
        ranks = None
    write_json(directory / results, {**telling, "ranks": ranks})
    for path in left:
        if path.name != results:
            path.unlink()
