# SPDX-License-Identifier: Apache-2.0
"""The events around a device's peak, out of however many there are, in the memory of those alone."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.events import ALLOC, FREE, OOM, RETAG, ROW, SEED, Events, Rows


@dataclass
class Window:
    """Of one device.

    Attributes:
        before: of the blocks that are live when the window begins, their births and their latest retags.
        rows: what happened to blocks from then on, and allocations that failed.
    """

    before: Rows = field(default_factory=lambda: np.empty(0, ROW))
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW))


def around_peak(events: Events, most: int) -> dict[int, Window]:
    """The windows by device id: all rows of a device, or `most` of them, among which its peak is in the middle or as
    near to it as the file's ends allow. Reads the file twice. Raises MemprofError where it cannot be read."""
    peaks: dict[int, _Peak] = {}

    def find(rows: Rows) -> None:
        for id, own in _by_device(rows):
            peaks.setdefault(id, _Peak()).take(own)

    events.each(find)
    firsts = {id: int(np.clip(peak.place - most // 2, 0, max(peak.count - most, 0))) for id, peak in peaks.items()}
    windows = {id: Window() for id in peaks}
    counts = dict.fromkeys(peaks, 0)

    def keep(rows: Rows) -> None:
        for id, own in _by_device(rows):
            window, begin = windows[id], max(firsts[id] - counts[id], 0)
            end = max(firsts[id] + most - counts[id], 0)
            window.before = _still_live(np.concatenate([window.before, own[:begin]]))
            window.rows = np.concatenate([window.rows, own[begin:end]])
            counts[id] += len(own)

    events.each(keep)
    return windows


class _Peak:
    """Where among a device's rows its highest sum is."""

    def __init__(self) -> None:
        self.count = 0
        self.place = 0
        self._live = self._highest = 0

    def take(self, rows: Rows) -> None:
        sign = np.select([np.isin(rows["kind"], (ALLOC, SEED)), rows["kind"] == FREE], [1, -1])
        live = self._live + np.cumsum(sign * rows["bytes"].astype(np.int64))
        at = int(np.argmax(live))
        if live[at] > self._highest:
            self._highest, self.place = int(live[at]), self.count + at
        self._live = int(live[-1])
        self.count += len(rows)


def _by_device(rows: Rows) -> list[tuple[int, Rows]]:
    rows = rows[(rows["block"] >= 0) | (rows["kind"] == OOM)]
    return [(id, rows[rows["device"] == id]) for id in np.unique(rows["device"]).tolist()]


def _still_live(rows: Rows) -> Rows:
    """Births and latest retags of the blocks that these rows leave alive."""
    rows = rows[rows["block"] >= 0]
    rows = rows[~np.isin(rows["block"], rows["block"][rows["kind"] == FREE])]
    kept: npt.NDArray[np.bool_] = rows["kind"] != RETAG
    retags = np.flatnonzero(~kept)[::-1]
    kept[retags[np.unique(rows["block"][retags], return_index=True)[1]]] = True
    alive: Rows = rows[kept]
    return alive
