# SPDX-License-Identifier: Apache-2.0
"""Every event of a profile, with settled categories and names, for exports that need more than profile.json."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from opacus_memprof import core
from opacus_memprof.analysis.names import Names
from opacus_memprof.analysis.profile import read_meta
from opacus_memprof.directory import META
from opacus_memprof.errors import MemprofError

Rows = npt.NDArray[np.void]

# One event. `block` is -1 where there is none; `bytes` are the block's, or what the event's kind says.
ROW = np.dtype(
    [("event", "<u8"), ("time_ns", "<i8"), ("block", "<i8"), ("bytes", "<u8"), ("address", "<u8"), ("step", "<u4")]
    + [("module", "<u2"), ("op", "<u2")]
    + [(name, "u1") for name in ("kind", "category", "before", "tag", "phase", "device", "stream", "thread")]
)

KINDS = ("none", "alloc", "free", "retag", "step", "phase", "snapshot", "seed", "oom")
ALLOC, FREE, RETAG, STEP, PHASE, SNAPSHOT, SEED, OOM = range(1, 9)


class Events:
    """The events of a profile directory, in order.

    `category` of a row is as profile.json has it, from the block's birth on; `before` is that before a retag, and `tag`
    what the record itself says. Adding `bytes` of the rows that have a block (alloc and seed to `category`, free from
    it, retag from `before` to it) gives the live bytes at every event.

    Raises:
        MemprofError: meta.json cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory)
        builtin = {"category_names": core.BUILTIN_CATEGORIES, "phase_names": core.BUILTIN_PHASES}
        self.names = Names(read_meta(self._path / META), builtin)

    def each(self, take: Callable[[Rows], object]) -> None:
        """Calls `take` with all rows, in arrays of ROW of some ten thousand.

        Raises:
            MemprofError: events.bin is missing, truncated, foreign or of another version.
        """

        def take_bytes(rows: bytes) -> None:
            take(np.frombuffer(rows, ROW))

        try:
            core.for_event_rows(str(self._path), take_bytes)
        except RuntimeError as error:
            raise MemprofError(f"there are no readable events in {self._path}: {error}") from error


def decoded(ids: npt.NDArray[Any], name: Callable[[int], str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Ids as places in a list of the names that occur: what a dictionary column is made of."""
    used, places = np.unique(ids, return_inverse=True)
    return places.astype(np.int32), [name(int(id)) for id in used]
