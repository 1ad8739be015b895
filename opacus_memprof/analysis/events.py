# SPDX-License-Identifier: Apache-2.0
"""Reads every event of a profile, with settled categories and names, for exports that need more than profile.json."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.names import Names
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.directory import META
from opacus_memprof.profiles.meta import read_meta

Rows = npt.NDArray[np.void]

# The dtype of an event. `block` is -1 for events without a block; `bytes` is the size of the block, or see
# docs/format.md.
ROW = np.dtype(
    [("event", "<u8"), ("time_ns", "<i8"), ("block", "<i8"), ("bytes", "<u8"), ("address", "<u8"), ("step", "<u4")]
    + [("module", "<u2"), ("op", "<u2")]
    + [(name, "u1") for name in ("kind", "category", "before", "tag", "phase", "device", "stream", "thread")]
)

KINDS = ("none", "alloc", "free", "retag", "step", "phase", "snapshot", "seed", "oom", "settled", "gap")
ALLOC, FREE, RETAG, STEP, PHASE, SNAPSHOT, SEED, OOM = range(1, 9)
GAP = 10  # `bytes` events are missing here; free, retag and seed rows after it tell what became of blocks


class Events:
    """The events of a profile directory, in order.

    `category` of a row is the settled one, as in profile.json; `before` is the category before a retag, and `tag` the
    one in the record. The live bytes at every event follow from the rows with a block: alloc and seed add `bytes` to
    `category`, free subtracts them, and retag moves them from `before` to `category`.

    Raises:
        MemprofError: meta.json cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory)
        builtin = {"category_names": core.BUILTIN_CATEGORIES, "phase_names": core.BUILTIN_PHASES}
        self.names = Names(read_meta(self._path / META).names, builtin)

    def for_each_chunk(self, callback: Callable[[Rows], object]) -> None:
        """Calls `callback` with all rows, in arrays (of dtype ROW) of some ten thousand rows.

        Raises:
            MemprofError: events.bin is missing, truncated, not an event file or of another version.
        """

        def on_chunk(rows: bytes) -> None:
            callback(np.frombuffer(rows, ROW))

        try:
            core.for_event_rows(str(self._path), on_chunk)
        except RuntimeError as error:
            raise MemprofError(f"there are no readable events in {self._path}: {error}") from error


def encode_names(ids: npt.NDArray[Any], name: Callable[[int], str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Encodes ids as indices into a list of the names that occur, for a dictionary column."""
    used, indices = np.unique(ids, return_inverse=True)
    return indices.astype(np.int32), [name(int(id)) for id in used]
