# SPDX-License-Identifier: Apache-2.0
"""Runs in several processes, over which FSDP2 shards the model: their process group and their results."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.files import read_result, write_json

# The status of the merged result is the first of these that a process has.
_STATUS_ORDER = ("out_of_memory", "failed", "killed", "finished")

_GLOO_EXIT_SECONDS = 0.2


def join_group(device: str) -> torch.device:
    """Joins the process group, and returns the device of this process. Raises the errors of torch.distributed.

    Raises:
        MemprofError: there are fewer GPUs than processes.
    """
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if own.index >= torch.cuda.device_count():
        raise MemprofError(f"there are {torch.cuda.device_count()} GPUs: use at most as many processes")
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return own


def leave_group() -> None:
    """Leaves the process group. The process may end then."""
    if not dist.is_initialized():
        return
    backend = dist.get_backend()
    dist.destroy_process_group()
    if backend == "gloo":
        # gloo's threads, which DTensor's caches keep running, free a collective's tensors some time after its result is
        # ready. If Python ends while such a thread waits for the GIL, the process aborts.
        time.sleep(_GLOO_EXIT_SECONDS)


def shard(model: nn.Module) -> Any:
    """Returns the model with every layer sharded separately, as Opacus requires."""
    return FSDP2Wrapper(model)


def rank_result_file(name: str) -> str:
    """Returns the name of the file for this process' result: `name` for rank 0, `result_1.json` … for the others."""
    rank = int(os.environ.get("RANK", "0"))
    return name if rank == 0 else f"{Path(name).stem}_{rank}.json"


def merge_results(directory: Path, name: str, profile: Path) -> None:
    """Merges the results of all ranks into the file `name`.

    It is the result with the worst status, with `ranks`, the summary of all ranks (docs/format.md). Writes nothing if
    no rank has left a result.
    """
    results = {path: read_result(path) for path in sorted(directory.glob(f"{Path(name).stem}*.json"))}
    if not results:
        return
    worst = min(results.values(), key=lambda result: _STATUS_ORDER.index(result.status))
    try:
        worst.ranks = load_ranks(profile)
    except MemprofError:
        worst.ranks = None
    write_json(directory / name, worst)
    for path in results:
        if path.name != name:
            path.unlink()
