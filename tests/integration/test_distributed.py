# SPDX-License-Identifier: Apache-2.0
"""Two processes over gloo on the CPU, each profiled, and their profiles together."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from tests import warm_python
from tests.integration.scripts.train_ranks import BATCH, CLASSES, FEATURES, WIDTH

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train_ranks.py")
RUN = ("-m", "opacus_memprof", "run", "--device", "cpu", "-o")
ENVIRONMENT = warm_python.ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {})
WEIGHTS = (FEATURES * WIDTH + WIDTH, WIDTH * WIDTH + WIDTH, WIDTH * CLASSES + CLASSES)
PARAMETERS = 4 * sum(WEIGHTS)
ONE_STEP = "import torch\ntorch.nn.Linear(64, 64)(torch.ones(8, 64)).sum().backward()\n"


def ranks(*arguments: str | Path) -> tuple[list[int], list[str]]:
    """Runs python as rank 0 and rank 1, and returns their exit codes and what they printed."""
    command = [*warm_python.interpreter(), str(SCRIPTS / "start_ranks.py"), "2", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    codes, printed = json.loads(done.stdout)
    return codes, printed


def profiles(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads((directory / f"rank_{rank}/profile.json").read_text()) for rank in (0, 1)]
    for profile in found:
        peak = profile["devices"]["cpu"]["peak"]
        assert sum(peak["categories"].values()) == peak["requested_bytes"] > 0
        data = 4 * 3 * BATCH * (FEATURES + 2)  # the script's own, with labels of 8 bytes
        assert peak["categories"]["unattributed"] - data < 0.02 * peak["requested_bytes"]
        assert all(snapshot["remainder"] == 0 for snapshot in profile["devices"]["cpu"]["snapshots"])
    return found


def losses(printed: str) -> list[str]:
    return re.findall(r"^rank .* step .*$", printed, re.MULTILINE)


def test_fsdp2_on_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *RUN, str(tmp_path / "out")]
    command += [TRAIN, "fsdp2/ghost_fsdp/flat"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, finished" in done.stdout
    for profile in profiles(tmp_path / "out"):
        device = profile["devices"]["cpu"]
        categories = device["peak"]["categories"]
        assert categories["model_parameters"] == PARAMETERS // 2  # this rank's shards
        assert categories["gradients"] == PARAMETERS // 2
        steps = 4 * 2 * len(WEIGHTS)  # Adam's own counts, one for each parameter
        assert categories["optimizer_states"] == 2 * (PARAMETERS // 2) + steps
        assert max(device["timeline"]["categories"]["unsharded_parameters"]) == 4 * max(WEIGHTS)
        assert max(device["timeline"]["categories"]["unsharded_gradients"]) == 4 * max(WEIGHTS)
        (noise,) = (found for found in profile["findings"] if found["kind"] == "noise_of_whole_parameters")
        assert (noise["module"], noise["bytes"]) == ("2", 2 * (4 * WIDTH * WIDTH - 4 * WIDTH * WIDTH // 2))
    summary = json.loads((tmp_path / "out/ranks.json").read_text())
    assert [row["status"] for row in summary["ranks"]] == ["finished", "finished"]
    assert summary["warnings"] == []


def test_ddp_and_a_rank_that_is_killed(tmp_path: Path) -> None:
    codes, printed = ranks(*RUN, tmp_path / "out", TRAIN, "ddp/hooks/flat", "--kill", "1")
    assert codes == [1, -signal.SIGKILL]
    summary = json.loads((tmp_path / "out/ranks.json").read_text())  # by rank 0, which lost its partner
    assert [(row["status"], row["steps"]) for row in summary["ranks"]] == [("failed", 2), ("killed", 2)]
    assert "rank 1 was killed after 2 steps" in printed[0]
    for row in summary["ranks"]:
        assert row["peak"]["categories"]["communication"] == PARAMETERS  # the buckets
        assert row["peak"]["categories"]["model_parameters"] == PARAMETERS
        assert sum(row["peak"]["categories"].values()) == row["peak"]["requested_bytes"]
    (twice,) = (found for found in summary["findings"] if found["kind"] == "gradients_reduced_twice")
    assert (twice["bytes"], twice["ranks"]) == (PARAMETERS, [0])
    reported = CliRunner().invoke(app, ["report", str(tmp_path / "out")])
    assert reported.exit_code == 0
    assert "2 ranks, failed" in reported.output
    assert "per_sample_gradients" in reported.output


BLOCKED = """
import signal, threading, os
from datetime import timedelta
import torch
kept = torch.zeros(1000)
print("step 2 ", flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
store.wait(["never"], timedelta(seconds=90))
"""


def test_a_rank_that_waits_for_others_is_ended(tmp_path: Path) -> None:
    """In a collective python runs no signal handlers."""
    (tmp_path / "blocked.py").write_text(BLOCKED)
    command = [sys.executable, *RUN, str(tmp_path / "out"), str(tmp_path / "blocked.py")]
    environment = ENVIRONMENT | {"WORLD_SIZE": "2", "RANK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGTERM, done.stderr
    profile = json.loads((tmp_path / "out/rank_1/profile.json").read_text())
    assert (profile["status"], profile["exit_code"]) == ("killed", 128 + signal.SIGTERM)
    assert profile["devices"]["cpu"]["end_bytes"] >= 4000


WAYS = (
    "dpddp/hooks/flat",
    "ddp/hooks/flat",
    "ddp/ghost/flat",
    "dpddp/hooks/per_layer",
    "fsdp2/ghost_fsdp/flat",
    "fsdp2_bf16/ghost_fsdp/flat",
)


@pytest.mark.slow
def test_the_runs_are_the_same(tmp_path: Path) -> None:
    codes, reference = ranks(TRAIN, *WAYS)
    assert codes == [0, 0], reference
    codes, printed = ranks(*RUN, tmp_path / "out", TRAIN, *WAYS)
    assert codes == [0, 0], printed
    for plain, profiled in zip(reference, printed, strict=True):
        assert losses(plain) == losses(profiled)
        assert len(losses(plain)) == 3 * len(WAYS)
    profiles(tmp_path / "out")


def test_a_rank_that_cannot_be_copied_says_how(tmp_path: Path) -> None:
    train, own = tmp_path / "train.py", tmp_path / "out"
    train.write_text(ONE_STEP)
    done = subprocess.run(
        [*warm_python.interpreter(), *RUN, "out", "--gather", "file:///dev/null/bucket", str(train)],
        cwd=tmp_path,
        env=ENVIRONMENT | {"WORLD_SIZE": "2", "RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((own / "rank_1/profile.json").read_text())["status"] == "finished"
    assert f"cannot copy {own}/rank_1 to file:///dev/null/bucket (NotADirectoryError: " in done.stderr
    assert f"copy it by `opacus-memprof merge {own} -o file:///dev/null/bucket`" in done.stderr


WORKER = """
import os, subprocess, sys
import torch
import opacus_memprof

directory, address = sys.argv[1:]
own = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
torch.distributed.init_process_group("gloo", init_method=f"file://{address}.store", **own)
with opacus_memprof.profile(directory):
    torch.nn.Linear(64, 64)(torch.ones(8, 64)).sum().backward()
torch.distributed.barrier()
if os.environ["LOCAL_RANK"] == "0":
    subprocess.run([sys.executable, "-m", "opacus_memprof", "merge", directory, "-o", address], check=True)
"""


def test_the_recipe_for_workers_of_ray_train(tmp_path: Path) -> None:
    """The loop of each worker, in processes with the variables and the process group that TorchTrainer gives them."""
    (tmp_path / "worker.py").write_text(WORKER)
    assert ranks(tmp_path / "worker.py", tmp_path / "job", tmp_path / "all")[0] == [0, 0]
    assert [json.loads((tmp_path / f"all/rank_{rank}/profile.json").read_text())["status"] for rank in "01"] == [
        "finished",
        "finished",
    ]
    assert len(json.loads((tmp_path / "all/ranks.json").read_text())["ranks"]) == 2


def test_the_recipe_for_srun(tmp_path: Path) -> None:
    """Each process has a directory of its own, as on a machine of its own."""
    (tmp_path / "train.py").write_text(ONE_STEP)
    for rank in "01":
        variables = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
        (tmp_path / rank).mkdir()
        done = subprocess.run(
            [
                sys.executable,
                *RUN,
                "out",
                "--gather",
                f"file://{tmp_path}/all",
                str(tmp_path / "train.py"),
            ],  # one parent
            cwd=tmp_path / rank,
            env=ENVIRONMENT | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert ("`opacus-memprof merge" in done.stderr) == (rank == "0")
        profile = json.loads((tmp_path / rank / f"out/rank_{rank}/profile.json").read_text())
        assert profile["status"] == "finished"
    result = CliRunner().invoke(app, ["merge", f"file://{tmp_path}/all", "-o", str(tmp_path / "merged")])
    assert "2 ranks, finished" in result.output


def test_what_cannot_be_gathered_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(MemprofError, match=r"quaint://a cannot be opened \(Protocol not known: quaint\): install what"):
        CliRunner().invoke(app, ["run", "--gather", "quaint://a", str(tmp_path / "train.py")], catch_exceptions=False)
