# SPDX-License-Identifier: Apache-2.0
"""A test's own memory, apart from what was there before it.

A block that earlier tests, wider fixtures or the test's module have left enters the event file as a seed. It is the
test's own if the test gives it a meaning (attaching a model retags its parameters); otherwise all its events are left
out, so that the replay is the one of a process in which only this test has run.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.directory import EVENTS, META

Block = tuple[int, int]  # device's number in the file, address

_HEADER_BYTES = 4096  # docs/format.md, as all that follows
_COUNT = slice(16, 24)
_ALLOC, _FREE, _RETAG, _SEED = 1, 2, 3, 7
_LOW_48 = (1 << 48) - 1


class OwnEvents:
    """The events so far of a profile that is running.

    Args:
        directory: the profile's.
        written: how many events there are; the file's header tells it a moment late.

    Attributes:
        foreign: blocks that were there before, are still alive, and that the test has given no meaning.
        older: all blocks that were there before and are still alive.
    """

    def __init__(self, directory: Path, written: int) -> None:
        self._directory = directory
        with open(directory / EVENTS, "rb") as file:
            self._header = bytearray(file.read(_HEADER_BYTES))
            self._words = np.fromfile(file, "<u8", 4 * written).reshape(-1, 4)
        self.foreign: set[Block] = set()
        self.older: set[Block] = set()
        self._left_out = self._look()

    def profile(self) -> dict[str, Any]:
        """The content of profile.json for the test's own memory, but its timeline. Raises MemprofError as build_profile
        does."""
        if not self._left_out:
            return build_profile(self._directory, status="running", exit_code=None, timeline_points=1)
        kept: NDArray[np.uint64] = np.delete(self._words, self._left_out, axis=0)
        self._header[_COUNT] = len(kept).to_bytes(8, "little")
        with tempfile.TemporaryDirectory(prefix="memprof_") as folder:
            (Path(folder) / META).write_bytes((self._directory / META).read_bytes())
            (Path(folder) / EVENTS).write_bytes(bytes(self._header) + kept.tobytes())
            return build_profile(folder, status="running", exit_code=None, timeline_points=1)

    def _look(self) -> list[int]:
        """The records that are left out."""
        kinds = self._words[:, 0] >> 48 & 0xFF
        places = self._words[:, 1] & ~np.uint64(0xFF << 48)  # address and device, without the phase
        seeds = kinds == _SEED
        if not seeds.any():
            return []
        among = np.isin(places, places[seeds]) & np.isin(kinds, (_ALLOC, _FREE, _RETAG, _SEED))
        records: dict[int, list[int]] = {}  # of the blocks that are alive and were there before
        with_meaning: set[int] = set()
        left_out: list[int] = []
        for index in np.flatnonzero(among).tolist():
            kind, place = int(kinds[index]), int(places[index])
            if kind == _SEED:
                records[place] = [index]
            elif place in records:
                records[place].append(index)
                if kind == _RETAG:
                    with_meaning.add(place)
                else:
                    of_block = records.pop(place)
                    if place not in with_meaning:
                        left_out += of_block
                    with_meaning.discard(place)
        for place, of_block in records.items():
            block = (place >> 56, place & _LOW_48)
            self.older.add(block)
            if place not in with_meaning:
                self.foreign.add(block)
                left_out += of_block
        return left_out
