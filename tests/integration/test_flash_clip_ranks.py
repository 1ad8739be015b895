# SPDX-License-Identifier: Apache-2.0
"""flash_clip on several ranks trains as one process does on the samples of all ranks."""

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.analysis.events import FREE, RETAG, STEP
from tests.event_rows import rows_of
from tests.integration.scripts.clip_ranks import CASES
from tests.integration.scripts.train_ranks import BATCH, FEATURES, WIDTH
from tests.integration.test_distributed import ENVIRONMENT, PARAMETERS, RUN, TRAIN, WEIGHTS, profiles, ranks
from tests.warm_python import interpreter

SCRIPT = Path(__file__).parent / "scripts" / "clip_ranks.py"


# What depends on how many ranks there are: shapes of shards, and whether all of them hear of one. Modes, precisions and
# models are tried with two.
WITH_FOUR = {
    "ddp dpddp": [
        *("ddp poisson transformer", "dpddp poisson transformer", "ddp noise", "dpddp noise", "ddp memory manager"),
        *("ddp sensitivity", "ddp refusals", "ddp one rank finds", "ddp in a part"),
    ],
    "fsdp2": [
        *("fsdp2 transformer", "fsdp2 convnet", "fsdp2 sums one by one", "fsdp2 sampled", "fsdp2 columns"),
        *("fsdp2 sensitivity", "fsdp2 one layer", "fsdp2 noise", "fsdp2 refusals", "fsdp2 lockstep", "fsdp2 mixing"),
        "fsdp2_hybrid",
    ],
}
# What one process does as well, each beside another case of the same shards, or of the other precision or model.
NIGHTLY = [
    *("ddp float32 transformer", "ddp bfloat16 convnet", "ddp autocast", "fsdp2 compiled", "fsdp2 blocks"),
    *("fsdp2 recognized", "fsdp2 kept", "fsdp2 float32", "fsdp2 unwrapped", "fsdp2 adapters"),
    "fsdp2 lockstep in blocks",
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("groups", ["ddp dpddp", "fsdp2"])
def test_ranks_train_as_one_process(groups: str, world: int) -> None:
    with_two = [case for case in CASES if case.split()[0] in groups.split() and case not in NIGHTLY]
    check_cases("gloo", world, with_two if world == 2 else WITH_FOUR[groups], ENVIRONMENT)


@pytest.mark.nightly
def test_ranks_train_as_one_process_in_more_ways() -> None:
    check_cases("gloo", 2, NIGHTLY, ENVIRONMENT)


def check_cases(backend: str, world: int, groups: list[str], environment: dict[str, str]) -> None:
    """The cases, or groups of them, say how far they are from clipping by hand in one process: it is rounding."""
    command = [*interpreter(), str(SCRIPT), backend, str(world), *groups]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    compared = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}
    assert list(compared) == [case for case in CASES if case in groups or case.split()[0] in groups]
    assert {*groups} <= {*CASES, *(case.split()[0] for case in CASES)}
    for case, difference in compared.items():
        assert difference < tolerance(case), case


def tolerance(case: str) -> float:
    """Of the type that a case computes in."""
    if "bfloat16" in case or "autocast" in case:
        return 8e-2
    return 1e-5 if "float32" in case or "mixed" in case else 1e-10


def test_fsdp2_is_attributed(tmp_path: Path) -> None:
    codes, printed = ranks(*RUN, tmp_path / "out", TRAIN, "fsdp2/flash_clip/flat")
    assert codes == [0, 0], printed
    for profile in profiles(tmp_path / "out"):
        device = profile["devices"]["cpu"]
        assert device["peak"]["categories"]["model_parameters"] == PARAMETERS // 2  # this rank's shards
        highest = {name: max(values) for name, values in device["timeline"]["categories"].items()}
        assert highest["unsharded_parameters"] == 4 * max(WEIGHTS)
        assert highest.get("unsharded_gradients", 0) == 0  # autograd forms none
        assert highest["noise"] == 4 * WIDTH * WIDTH // 2  # of a shard
        assert highest["gradients"] == PARAMETERS // 2
        assert highest["optimizer_states"] == 2 * (PARAMETERS // 2) + 4 * 2 * len(WEIGHTS)
        assert highest["summed_gradients"] >= PARAMETERS // 2
        assert profile["findings"] == []


def test_a_rank_is_killed_under_ddp(tmp_path: Path) -> None:
    for row in rows_after_a_kill(tmp_path / "out", "ddp/flash_clip/flat"):
        peak = row["peak"]
        assert peak["categories"]["model_parameters"] == PARAMETERS
        data = 4 * 3 * BATCH * (FEATURES + 2)  # the script's own, with labels of 8 bytes
        assert peak["categories"].get("unattributed", 0) - data < 0.02 * peak["requested_bytes"]
    summary = json.loads((tmp_path / "out/ranks.json").read_text())
    assert summary["findings"] == []  # DDP's reducer has nothing to do
    timeline = json.loads((tmp_path / "out/rank_0/profile.json").read_text())["devices"]["cpu"]["timeline"]
    assert max(timeline["categories"]["summed_gradients"]) == PARAMETERS
    assert max(timeline["categories"]["noise"]) == 4 * WIDTH * WIDTH  # of the largest parameter
    made, overdue = gradients_by_step(tmp_path / "out/rank_0")
    assert made == dict.fromkeys(range(3), PARAMETERS)  # the sums themselves
    assert max(timeline["categories"]["gradients"]) == PARAMETERS + overdue


def test_a_rank_is_killed_under_fsdp2(tmp_path: Path) -> None:
    for row in rows_after_a_kill(tmp_path / "out", "fsdp2/flash_clip/flat"):
        assert row["peak"]["categories"]["model_parameters"] == PARAMETERS // 2


def rows_after_a_kill(directory: Path, way: str) -> Iterator[dict[str, Any]]:
    """Returns the ranks in ranks.json after rank 1 was killed.

    Rank 0, which waits for it, ends with gloo's sentence, and both profiles are whole.
    """
    codes, printed = ranks(*RUN, directory, TRAIN, way, "--kill", "1")
    assert codes == [1, -signal.SIGKILL]
    assert re.search(r"Connection (closed by peer|reset)", printed[0])
    summary = json.loads((directory / "ranks.json").read_text())
    assert [(row["status"], row["steps"]) for row in summary["ranks"]] == [("failed", 2), ("killed", 2)]
    for row in summary["ranks"]:
        assert sum(row["peak"]["categories"].values()) == row["peak"]["requested_bytes"]
        yield row


def gradients_by_step(directory: Path) -> tuple[dict[int, int], int]:
    """(bytes that became gradients, by step; the most bytes of earlier steps' that were live beside all of a step's).

    On a busy machine these are not always 0. A thread of gloo's tells those who wait that a sum is complete, and lets
    go of the tensor after that, which can be in the next step: then that thread frees it.
    """
    rows, names = rows_of(directory)
    main = int(next(row["thread"] for row in rows if row["kind"] == STEP))
    made: Counter[int] = Counter()
    live: dict[int, tuple[int, int]] = {}  # gradients: (step, bytes), by block
    overdue, overdue_now = 0, set[int]()
    for row in rows:
        block, step, size = (int(row[name]) for name in ("block", "step", "bytes"))
        before, after = (names.reported_category(row[name]) for name in ("before", "category"))
        if row["kind"] == RETAG and after == "gradients" != before:
            made[step] += size
            live[block] = step, size
            overdue_now = {each for each, (begun, _) in live.items() if begun < step}
            if made[step] == PARAMETERS:
                overdue = max(overdue, sum(live[each][1] for each in overdue_now))
        elif row["kind"] == FREE and live.pop(block, None):
            assert block not in overdue_now or row["thread"] != main
    return made, overdue
