# SPDX-License-Identifier: Apache-2.0
"""The same step again is attributed the same way.

Nothing that a step leaves behind in the profiler changes how the next one is attributed.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opacus import PrivacyEngine

import opacus_memprof
from opacus_memprof.analysis.events import ALLOC, RETAG
from tests import models
from tests.event_rows import rows_of
from tests.models import MODELS, MODES, Model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
OF_DATA = {"compute_embedding_norm_sample"}  # its matrices have a row for each token that a sample has
STEPS = 5
FIRST = 2  # the steps before fill caches, and make the optimizer's states
LAST = STEPS - 2  # what autograd's thread has not dropped when the file ends is told as having outlived its step


def attributions_by_step(directory: Path) -> list[Counter[tuple[Any, ...]]]:
    """How often each step allocated, or gave another category to, so many bytes under each combination of names."""
    rows, names = rows_of(directory)
    found: list[Counter[tuple[Any, ...]]] = [Counter() for _ in range(STEPS)]
    for row in rows[np.isin(rows["kind"], (ALLOC, RETAG)) & (rows["step"] < STEPS)]:
        before = names.category(row["before"]) if row["kind"] == RETAG else None
        tag = (
            names.phase(row["phase"]),
            names.module(row["module"]),
            names.op(row["op"]),
            names.category(row["category"]),
        )
        size = None if tag[2] in OF_DATA else int(row["bytes"])
        found[row["step"]][(*tag, before, size)] += 1
    return found


@pytest.mark.parametrize("mode", [*MODES, "flash_clip"])
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_attributed_as_the_one_before(device: str, model: Model, mode: str, tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path, device=device) as session:
        engine = opacus_memprof.PrivacyEngine() if mode == "flash_clip" else PrivacyEngine()
        session.attach(engine)
        # A step whose situation is checked has a proof beside what all steps have.
        options = {"check": "first"} if mode == "flash_clip" else {}
        training = models.prepare(model, mode, device, engine, **options)
        for _ in range(STEPS):
            training.step(filling=opacus_memprof.tag("per_sample_gradients"))
    steps = attributions_by_step(tmp_path)
    for step in range(FIRST, LAST):
        assert steps[step] == steps[step + 1], {
            "gone": steps[step] - steps[step + 1],
            "new": steps[step + 1] - steps[step],
        }
