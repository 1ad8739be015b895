# SPDX-License-Identifier: Apache-2.0
"""What a plan says that a GPU must have, against runs on virtual GPUs with as much, and with 3 % less."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram
from opacus_memprof.planning.runs import open_runs
from opacus_memprof.planning.verdict import judge

SCRIPT = Path(__file__).parent / "scripts" / "train_needs.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shared_forks"),
    pytest.mark.skipif(
        sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
    ),
]


@pytest.mark.parametrize(
    ("kind", "memory", "waste"),
    [
        pytest.param("lstm", 360 * 2**20, 0.99, marks=pytest.mark.nightly),
        ("cnn", None, 1.04),
        pytest.param("transformer", None, 1.2, marks=pytest.mark.nightly),
    ],
    ids=["an LSTM that does not fit", "a CNN with drawn batches", "a transformer"],
)
def test_a_gpu_must_have_what_is_needed(kind: str, memory: int | None, waste: float, tmp_path: Path) -> None:
    """`waste`: so many times as much is taken where there is room."""
    configuration = PlannedConfiguration(PlannedProgram(str(SCRIPT), (kind,)), "t4", memory)
    with open_runs(tmp_path / "plan", resume=False, on_end=lambda *ended: None) as runs:
        verdict = judge(runs, configuration)
        sizes = (verdict.needed, int(0.97 * verdict.needed))
        tried = runs.all([replace(configuration, memory=size) for size in sizes])
    assert [run.status for run in tried] == ["finished", "out_of_memory"]
    roomy = verdict.run if memory is None else verdict.whole
    assert roomy is not None
    assert roomy.reserved is not None
    assert roomy.context is not None
    assert roomy.reserved + roomy.context >= waste * verdict.needed
