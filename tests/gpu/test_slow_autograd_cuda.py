# SPDX-License-Identifier: Apache-2.0
"""Autograd's thread drops a backward's results a moment after the program has gone on with them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from opacus_memprof.analysis.events import FREE, PHASE
from tests.event_rows import rows_of
from tests.on_virtual_gpu import interpreter


@pytest.mark.cuda
def test_what_autograd_drops_late_stays_its_temporaries(tmp_path: Path) -> None:
    directory = tmp_path / "profile"
    program = [*interpreter(), "-m", "tests.gpu.slow_autograd", str(directory)]
    subprocess.run(program, check=True, cwd=Path(__file__).parents[2])

    rows, names = rows_of(directory)
    # Of the thread's frees some come after the program has entered a later phase: else nothing is tested here.
    autograd = np.array([names.thread(id) == "pt_autograd_0" for id in rows["thread"]])
    phase_marks = np.cumsum(rows["kind"] == PHASE)
    born_at = {block: marks for block, marks in zip(rows["block"][::-1], phase_marks[::-1], strict=True) if block >= 0}
    late = [
        row["bytes"]
        for row, marks in zip(rows[autograd], phase_marks[autograd], strict=True)
        if row["kind"] == FREE and marks > born_at[row["block"]]
    ]
    assert sum(late) > 1_000_000

    device = json.loads((directory / "profile.json").read_text())["devices"]["cuda:0"]
    assert device["peak"]["remainder_bytes"] == 0
    steps = device["steps"][:4]  # what the fifth leaves, the thread need not have dropped when the file ends
    assert all(step["complete"] for step in steps)
    for step in steps:
        assert step["categories"].get("unattributed", 0) <= 0.001 * step["peak_bytes"], step
