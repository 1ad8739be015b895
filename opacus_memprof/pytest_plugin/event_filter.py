# SPDX-License-Identifier: Apache-2.0
"""Filters the events of a test's own memory out of its event file.

A block from before the test (of earlier tests, wider fixtures or the test's module) is in the event file as a seed. It
counts if the test retags it, as attaching a model does with parameters. Otherwise all of its events are left out, so
that the replay is that of a process in which only this test has run.
"""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.events import FREE, RETAG, ROW, SEED, Events, Rows
from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.profiles.directory import EVENT_BYTES, EVENT_HEADER_BYTES, EVENTS, META
from opacus_memprof.profiles.profile import Profile

BlockKey = tuple[int, int]  # number of the device in the event file, address

# See docs/format.md.
_COUNT, _FIRST_EVENT, _SEEDS = slice(16, 24), slice(96, 104), slice(104, 112)
_SETTLED = 9


class TestEvents:
    """The events so far of a test that is running.

    Args:
        directory: of the profile.

    Attributes:
        earlier_blocks: blocks from before the test that are still live.
        foreign_blocks: those of them that the test has not retagged.

    Raises:
        MemprofError: the events cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        rows = _rows_of_seeded_blocks(Events(directory))
        block, kind = rows["block"], rows["kind"]
        retagged = block[kind == RETAG]
        live = rows[(kind == SEED) & ~np.isin(block, block[kind == FREE])]
        self.earlier_blocks = _keys(live)
        self.foreign_blocks = _keys(live[~np.isin(live["block"], retagged)])
        self._excluded: npt.NDArray[np.uint64] = np.unique(rows["event"][~np.isin(block, retagged)])

    def profile(self) -> Profile:
        """The profile of the test's own memory, without a timeline. Raises MemprofError as build_profile does."""
        if not self._excluded.size:
            return build_profile(self._directory, status="running", exit_code=None, timeline_points=1)
        header, records = _read_records(self._directory)
        kept = np.delete(records, self._excluded)
        header[_COUNT] = len(kept).to_bytes(8, "little")
        with tempfile.TemporaryDirectory(prefix="memprof_") as folder:
            (Path(folder) / META).write_bytes((self._directory / META).read_bytes())
            (Path(folder) / EVENTS).write_bytes(bytes(header) + kept.tobytes())
            return build_profile(folder, status="running", exit_code=None, timeline_points=1)


def _read_records(directory: Path) -> tuple[bytearray, npt.NDArray[np.void]]:
    """The header of the first piece of events, and the records of all pieces without their live sets."""
    pieces = []
    for path in [directory / EVENTS, *directory.glob("events.*.bin")]:
        with open(path, "rb") as file:
            header = bytearray(file.read(EVENT_HEADER_BYTES))
            records = np.fromfile(file, f"V{EVENT_BYTES}")
        first, seeds = (int.from_bytes(header[field], "little") for field in (_FIRST_EVENT, _SEEDS))
        events = records[seeds:]
        events = events[events.view("<u8").reshape(-1, 4)[:, 0] >> 48 & 255 != _SETTLED]
        pieces.append((first, header, events))
    pieces.sort(key=lambda piece: piece[0])
    return pieces[0][1], np.concatenate([events for _, _, events in pieces])


def _rows_of_seeded_blocks(events: Events) -> Rows:
    """The rows of all blocks that were there before the test, from seed to free."""
    chunks: list[Rows] = [np.empty(0, ROW)]
    seeded: npt.NDArray[np.int64] = np.empty(0, "<i8")

    def keep(rows: Rows) -> None:
        nonlocal seeded
        seeded = np.append(seeded, rows["block"][rows["kind"] == SEED])
        chunks.append(rows[np.isin(rows["block"], seeded)])

    events.for_each_chunk(keep)
    return np.concatenate(chunks)


def _keys(rows: Rows) -> set[BlockKey]:
    return set(zip(rows["device"].tolist(), rows["address"].tolist(), strict=True))
