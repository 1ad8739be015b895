# SPDX-License-Identifier: Apache-2.0
"""Reads the events around each device's peak, without reading all events into memory."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.events import ALLOC, FREE, OOM, RETAG, ROW, SEED, Events, Rows


@dataclass
class Window:
    """The events around the peak of one device.

    Attributes:
        already_live: the allocations, and the latest retags, of the blocks that are live when the window begins.
        rows: the events of blocks from then on, and allocations that failed.
    """

    already_live: Rows = field(default_factory=lambda: np.empty(0, ROW))
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW))


def around_peak(events: Events, max_rows: int) -> dict[int, Window]:
    """The windows by device id. Reads the file twice.

    Args:
        events: of the profile.
        max_rows: of a window. Its peak is in the middle, or as near to it as the file's ends allow.

    Raises:
        MemprofError: the event file cannot be read.
    """
    peaks: dict[int, _PeakFinder] = {}

    def find(rows: Rows) -> None:
        for id, device_rows in _by_device(rows):
            peaks.setdefault(id, _PeakFinder()).add(device_rows)

    events.for_each_chunk(find)
    firsts = {
        id: int(np.clip(peak.index - max_rows // 2, 0, max(peak.count - max_rows, 0))) for id, peak in peaks.items()
    }
    windows = {id: Window() for id in peaks}
    counts = dict.fromkeys(peaks, 0)

    def keep(rows: Rows) -> None:
        for id, device_rows in _by_device(rows):
            window, begin = windows[id], max(firsts[id] - counts[id], 0)
            end = max(firsts[id] + max_rows - counts[id], 0)
            window.already_live = _still_live(np.concatenate([window.already_live, device_rows[:begin]]))
            window.rows = np.concatenate([window.rows, device_rows[begin:end]])
            counts[id] += len(device_rows)

    events.for_each_chunk(keep)
    return windows


class _PeakFinder:
    """Finds the row of a device's peak.

    Attributes:
        count: number of rows so far.
        index: of the row with the most live bytes.
    """

    def __init__(self) -> None:
        self.count = 0
        self.index = 0
        self._live = self._highest = 0

    def add(self, rows: Rows) -> None:
        sign = np.select([np.isin(rows["kind"], (ALLOC, SEED)), rows["kind"] == FREE], [1, -1])
        live = self._live + np.cumsum(sign * rows["bytes"].astype(np.int64))
        highest = int(np.argmax(live))
        if live[highest] > self._highest:
            self._highest, self.index = int(live[highest]), self.count + highest
        self._live = int(live[-1])
        self.count += len(rows)


def _by_device(rows: Rows) -> list[tuple[int, Rows]]:
    rows = rows[(rows["block"] >= 0) | (rows["kind"] == OOM)]
    return [(id, rows[rows["device"] == id]) for id in np.unique(rows["device"]).tolist()]


def _still_live(rows: Rows) -> Rows:
    """The allocations, and the latest retags, of the blocks that are live after these rows."""
    rows = rows[rows["block"] >= 0]
    rows = rows[~np.isin(rows["block"], rows["block"][rows["kind"] == FREE])]
    kept: npt.NDArray[np.bool_] = rows["kind"] != RETAG
    retags = np.flatnonzero(~kept)[::-1]
    kept[retags[np.unique(rows["block"][retags], return_index=True)[1]]] = True
    result: Rows = rows[kept]
    return result
