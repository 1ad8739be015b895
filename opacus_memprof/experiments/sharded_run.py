# SPDX-License-Identifier: Apache-2.0
"""Runs in several processes, over which FSDP2 shards the model, and merges their results."""

import os
from pathlib import Path
from typing import Any

from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.files import read_result, write_json

# The status of the merged result is the first of these that a process has.
_STATUS_ORDER = ("out_of_memory", "failed", "killed", "finished")


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
