# SPDX-License-Identifier: Apache-2.0
"""Autograd's thread drops a backward's results a moment after the program has gone on with them."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from opacus_memprof.analysis.events import ALLOC, FREE, PHASE
from tests.event_rows import rows_of
from tests.on_virtual_gpu import interpreter
from tests.warm_python import ENVIRONMENT


@pytest.mark.cuda
def test_what_autograd_drops_late_stays_its_temporaries(tmp_path: Path) -> None:
    directory = tmp_path / "profile"
    program = [*interpreter(), "-m", "tests.gpu.slow_autograd", str(directory)]
    subprocess.run(program, check=True, cwd=Path(__file__).parents[2], env=ENVIRONMENT)

    rows, names = rows_of(directory)
    entered = np.cumsum(rows["kind"] == PHASE)
    allocated = rows["kind"] == ALLOC
    births = dict(zip(rows["block"][allocated].tolist(), entered[allocated].tolist(), strict=True))
    categories = dict(zip(rows["block"][allocated].tolist(), rows["category"][allocated].tolist(), strict=True))
    thread = next(id for id in set(rows["thread"]) if names.thread(id) == "pt_autograd_0")
    late: Counter[str] = Counter()
    for index in np.flatnonzero((rows["kind"] == FREE) & (rows["thread"] == thread)):
        block = int(rows["block"][index])
        if entered[index] > births[block]:
            late[names.category(categories[block])] += int(rows["bytes"][index])
    # Of the thread's frees some come after the program has entered a later phase: else nothing is tested here.
    assert late["backward_temporaries"] > 1_000_000
    assert late["unattributed"] == 0, late

    device = json.loads((directory / "profile.json").read_text())["devices"]["cuda:0"]
    assert device["peak"]["remainder_bytes"] == 0
    assert all(step["complete"] for step in device["steps"][:5])
