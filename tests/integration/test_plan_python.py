# SPDX-License-Identifier: Apache-2.0
"""`opacus_memprof.plan` and `largest_physical_batch`: of functions, on virtual GPUs, against closed forms."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.virtual_gpu.devices import GPUS

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
MEMORY = 2**30
ROOM = MEMORY - GPUS["t4"].context_memory

pytestmark = [
    pytest.mark.usefixtures("shared_forks"),
    pytest.mark.skipif(
        sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
    ),
]


def train(samples: int = 3) -> None:
    """A step with 16 MiB a sample. What else there is takes one segment of 2 MiB."""
    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.empty(samples, 4 * MIB, device="cuda")
    for _ in range(2):
        model.weight.sum().backward()
        optimizer.step()
    del batch


def train_without_batches(samples: int = 1) -> None:
    train()


def fail() -> None:
    raise ValueError("no data")


def train_on_the_cpu() -> None:
    nn.Linear(2, 2)


@pytest.mark.slow
def test_a_function_is_planned_in_another_process(tmp_path: Path) -> None:
    planned = opacus_memprof.plan(train, gpu="t4", memory="1 GiB", directory=tmp_path)
    assert planned.fits
    needed = GPUS["t4"].context_memory + (3 * 16 + 2) * MIB
    assert needed <= planned.needed_bytes < needed + MIB  # in whole MiB
    assert planned.spare_bytes == MEMORY - planned.needed_bytes
    assert json.loads((tmp_path / "plan.json").read_text())["verdict"] == planned
    assert json.loads((tmp_path / "plan.json").read_text())["program"] == "train"
    assert json.loads((tmp_path / "profile.json").read_text())["status"] == "finished"
    best = opacus_memprof.largest_physical_batch(train, gpu="t4", memory=MEMORY, low=20, high=64, directory=tmp_path)
    assert best == (ROOM - 2 * MIB) // (16 * MIB) == 58


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (fail, r"fail failed on the virtual GPU \(ValueError: no data\): see .*log.txt"),
        (train_on_the_cpu, "train_on_the_cpu allocated nothing on the GPU: let it train on cuda"),
    ],
)
def test_functions_that_cannot_be_planned(tmp_path: Path, function: object, sentence: str) -> None:
    with pytest.raises(opacus_memprof.MemprofError, match=sentence):
        opacus_memprof.plan(function, gpu="t4", directory=tmp_path)  # type: ignore[arg-type]


@pytest.mark.slow
def test_memory_that_does_not_depend_on_the_number(tmp_path: Path) -> None:
    with pytest.raises(opacus_memprof.MemprofError, match="does not depend on the physical batch: it peaks at"):
        opacus_memprof.largest_physical_batch(train_without_batches, "t4", high=9, directory=tmp_path)


def test_what_is_refused_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(opacus_memprof.MemprofError, match='there is no virtual GPU "h300"'):
        opacus_memprof.plan(train, gpu="h300", directory=out)
    with pytest.raises(opacus_memprof.MemprofError, match="'much' is not a size"):
        opacus_memprof.plan(train, memory="much", directory=out)
    with pytest.raises(opacus_memprof.MemprofError, match="<lambda> cannot be run in a process of its own"):
        opacus_memprof.plan(lambda: None, directory=out)
    with pytest.raises(opacus_memprof.MemprofError, match="there are no batches from 9 to 1"):
        opacus_memprof.largest_physical_batch(train, low=9, high=1, directory=out)
    assert not out.exists()


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import opacus_memprof\ndef f(): pass\nopacus_memprof.plan(f, gpu='t4')\n")
    command = [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 1
    assert 'make it below `if __name__ == "__main__":`' in ended.stderr
