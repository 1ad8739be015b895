# SPDX-License-Identifier: Apache-2.0
"""Filters the events of a test's own memory out of its event file.

A block from before the test (of earlier tests, wider fixtures or the test's module) is in the event file as a seed. It
counts if the test retags it, as attaching a model does with parameters. Otherwise all of its events are left out, so
that the replay is that of a process in which only this test has run.
"""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.profiles.directory import EVENTS, META
from opacus_memprof.profiles.profile import Profile

Block = tuple[int, int]  # number of the device in the event file, address

# See docs/format.md.
_HEADER_BYTES = 4096
_COUNT = slice(16, 24)
_ALLOC, _FREE, _RETAG, _SEED = 1, 2, 3, 7
_LOW_48 = (1 << 48) - 1


class TestEvents:
    """The events so far of a test that is running.

    Args:
        directory: of the profile.
        written: the number of events; the count in the file's header lags behind.

    Attributes:
        earlier_blocks: blocks from before the test that are still live.
        foreign_blocks: those of them that the test has not retagged.
    """

    def __init__(self, directory: Path, written: int) -> None:
        self._directory = directory
        with open(directory / EVENTS, "rb") as file:
            self._header = bytearray(file.read(_HEADER_BYTES))
            self._words = np.fromfile(file, "<u8", 4 * written).reshape(-1, 4)
        self.foreign_blocks: set[Block] = set()
        self.earlier_blocks: set[Block] = set()
        self._excluded = self._find_excluded()

    def profile(self) -> Profile:
        """The profile of the test's own memory, without a timeline. Raises MemprofError as build_profile does."""
        if not self._excluded:
            return build_profile(self._directory, status="running", exit_code=None, timeline_points=1)
        kept: NDArray[np.uint64] = np.delete(self._words, self._excluded, axis=0)
        self._header[_COUNT] = len(kept).to_bytes(8, "little")
        with tempfile.TemporaryDirectory(prefix="memprof_") as folder:
            (Path(folder) / META).write_bytes((self._directory / META).read_bytes())
            (Path(folder) / EVENTS).write_bytes(bytes(self._header) + kept.tobytes())
            return build_profile(folder, status="running", exit_code=None, timeline_points=1)

    def _find_excluded(self) -> list[int]:
        """The indices of the records to leave out. Sets `earlier_blocks` and `foreign_blocks`."""
        kinds = self._words[:, 0] >> 48 & 0xFF
        addresses = self._words[:, 1] & ~np.uint64(0xFF << 48)  # with the device, without the phase
        seeds = kinds == _SEED
        if not seeds.any():
            return []
        relevant = np.isin(addresses, addresses[seeds]) & np.isin(kinds, (_ALLOC, _FREE, _RETAG, _SEED))
        records: dict[int, list[int]] = {}  # by address of a live block from before the test
        retagged: set[int] = set()
        excluded: list[int] = []
        for index in np.flatnonzero(relevant).tolist():
            kind, address = int(kinds[index]), int(addresses[index])
            if kind == _SEED:
                records[address] = [index]
            elif address in records:
                records[address].append(index)
                if kind == _RETAG:
                    retagged.add(address)
                else:
                    block_records = records.pop(address)
                    if address not in retagged:
                        excluded += block_records
                    retagged.discard(address)
        for address, block_records in records.items():
            block = (address >> 56, address & _LOW_48)
            self.earlier_blocks.add(block)
            if address not in retagged:
                self.foreign_blocks.add(block)
                excluded += block_records
        return excluded
