# SPDX-License-Identifier: Apache-2.0
"""Two processes over NCCL, a GPU each: every mode of Opacus that is distributed runs as without the profiler."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "tests/integration/scripts/train_ranks.py")
WAYS = (
    ("dpddp/hooks/flat", "ddp/hooks/flat", "ddp/ghost/flat", "dpddp/hooks/per_layer"),
    ("fsdp2/ghost_fsdp/flat", "fsdp2_bf16/ghost_fsdp/flat", "fsdp2_offload/ghost_fsdp/flat"),
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@contextlib.contextmanager
def started_ranks(*command: str, **variables: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Python with the command as rank 0 and rank 1, with more environment variables. Both have ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONWARNINGS": "ignore",
        "NCCL_NVLS_ENABLE": "0",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def both_ranks(*command: str) -> list[str]:
    """What rank 0 and rank 1 print; both must end well."""
    with started_ranks(*command) as started:
        printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    return printed


@pytest.mark.parametrize("ways", WAYS, ids=("ddp", "fsdp2"))
def test_the_runs_are_the_same_and_known(tmp_path: Path, ways: tuple[str, ...]) -> None:
    reference = both_ranks(TRAIN, *ways)
    printed = both_ranks("-m", "opacus_memprof", "run", "-o", str(tmp_path / "out"), TRAIN, *ways)
    for plain, profiled in zip(reference, printed, strict=True):
        losses = [re.findall(r"^rank .* step .*$", text, re.MULTILINE) for text in (plain, profiled)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 3 * len(ways)
    summary = json.loads((tmp_path / "out/ranks.json").read_text())
    assert summary["status"] == "finished"
    for row in summary["ranks"]:
        assert row["device"] == f"cuda:{row['rank']}"
        assert row["other_devices"] == {}
        assert row["outside_pytorch"] > 0
        profile = json.loads((tmp_path / "out" / row["directory"] / "profile.json").read_text())
        device = profile["devices"][row["device"]]
        peak = device["peak"]
        assert sum(peak["categories"].values()) == peak["requested_bytes"] == peak["counted_bytes"]
        assert all(snapshot["remainder"] == 0 for snapshot in device["snapshots"])
        assert sum(step["complete"] for step in device["steps"]) == 3 * len(ways)
        for step in device["steps"]:
            assert step["categories"].get("unattributed", 0) <= 0.02 * step["peak_bytes"], step
