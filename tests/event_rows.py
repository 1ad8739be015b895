# SPDX-License-Identifier: Apache-2.0
"""A profile's events, all at once."""

from collections import Counter
from pathlib import Path

import numpy as np

from opacus_memprof.analysis.events import ALLOC, Events, Names


def rows_of(directory: Path) -> tuple[np.ndarray, Names]:
    """The rows (opacus_memprof.analysis.events.ROW), and what their ids mean."""
    events, pieces = Events(directory), []
    events.for_each_chunk(pieces.append)
    return np.concatenate(pieces), events.names


def made_by_op(directory: Path, op: str) -> dict[int, Counter[tuple[str, int]]]:
    """How often each module allocated so many bytes in the op, by step."""
    rows, names = rows_of(directory)
    found: dict[int, Counter[tuple[str, int]]] = {}
    for row in rows:
        if row["kind"] == ALLOC and names.op(row["op"]) == op:
            found.setdefault(int(row["step"]), Counter())[names.module(row["module"]), int(row["bytes"])] += 1
    return found
