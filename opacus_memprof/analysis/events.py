# SPDX-License-Identifier: Apache-2.0
"""Reads the events of a profile, with settled categories: all of them, or those around each peak; names their ids.

Events are read in chunks, because a file may be larger than memory.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.categories import FORWARD_UNDECIDED, PARTS, reported_name
from opacus_memprof.profiles.directory import META
from opacus_memprof.profiles.profile import PROOF_OP, HookedActivations, NameLists, read_meta

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
GAP = 10  # `bytes` events are missing here; later free, retag and seed rows show the outcomes of blocks


class Names:
    """The names of one profile.

    Ids that the last meta.json of a killed process does not name become "module 17". Built-in categories and phases
    always have names.

    Args:
        names: the names of meta.json, or native.names().
        replayed: the result of core.replay.

    Attributes:
        components: module → the component that hooks recognised, or "".
    """

    def __init__(self, names: NameLists, replayed: Mapping[str, Any]) -> None:
        builtin: list[str] = replayed["category_names"]
        self._categories = [*builtin, *names.categories[len(builtin) :]]
        self._reported = [reported_name(name) for name in self._categories]
        self._builtin = {reported_name(name) for name in builtin} - {FORWARD_UNDECIDED}
        self._phases: Sequence[str] = replayed["phase_names"]
        self._modules = names.modules or [""]  # id 0 is none
        self.components = dict(zip(names.modules, names.components, strict=False))
        self._ops = names.ops or [""]
        self._lines = names.lines
        self._streams = names.streams
        self._threads = names.threads

    def category(self, id: int) -> str:
        return _name(self._categories, id, "category")

    def phase(self, id: int) -> str:
        return _name(self._phases, id, "phase")

    def module(self, id: int) -> str:
        """Returns the module's fully qualified name; "" means no module."""
        return _name(self._modules, id, "module")

    def op(self, id: int) -> str:
        return _name(self._ops, id, "op")

    def find_op(self, name: str) -> int | None:
        """Returns the id of an op; None if the profile has none of that name."""
        return self._ops.index(name) if name in self._ops else None

    def is_line(self, id: int) -> bool:
        """Returns whether the op stands for lines of the user's own code, `innermost < its caller < ...`."""
        return id < len(self._lines) and self._lines[id] != ""

    def stream(self, id: int) -> str:
        return _name(self._streams, id, "stream")

    def thread(self, id: int) -> str:
        return _name(self._threads, id, "thread")

    def device(self, id: int) -> str:
        return "cpu" if id == 0 else f"cuda:{id - 1}"

    def reported_category(self, id: int) -> str:
        return self._reported[id] if id < len(self._reported) else self.category(id)

    def categories(self, by_id: Sequence[int]) -> dict[str, int]:
        """Returns bytes by reported category, from bytes by category id, without empty categories."""
        result: dict[str, int] = {}
        for id, count in enumerate(by_id):
            if count:
                name = self.reported_category(id)
                result[name] = result.get(name, 0) + count
        return result

    def all_categories(self, by_id: Sequence[int]) -> dict[str, int]:
        """Returns bytes by reported category: all built-in ones, and the program's own that have bytes."""
        nonzero = self.categories(by_id)
        names = dict.fromkeys(self.reported_category(id) for id in range(len(self._categories)))
        return {name: nonzero.get(name, 0) for name in [*names, *nonzero] if name in self._builtin or name in nonzero}

    def hooked_activations(self, by_id: Sequence[int]) -> HookedActivations:
        """Returns the two parts of the category activation_hooks, from bytes by category id."""
        return HookedActivations(**{part: by_id[self._categories.index(name)] for name, part in PARTS.items()})


def _name(names: Sequence[str], id: int, kind: str) -> str:
    return names[id] if id < len(names) else f"{kind} {id}"


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
        """Calls `callback` with all rows, in arrays of dtype ROW with about ten thousand rows each.

        Raises:
            MemprofError: events.bin is missing, truncated, not an event file or of another version.
        """

        def on_chunk(rows: bytes) -> None:
            callback(np.frombuffer(rows, ROW))

        try:
            core.for_event_rows(str(self._path), on_chunk)
        except RuntimeError as error:
            raise MemprofError(f"there are no readable events in {self._path}: {error}") from error


def find_proofs(events: Events) -> list[tuple[int, int]]:
    """Returns the proofs of flash_clip, each as its first event and the one behind it; nothing without an event of one.

    A proof ends where its thread enters another phase, or another part of the same one.
    """
    op = events.names.find_op(PROOF_OP)
    spans: list[tuple[int, int]] = []
    begun: dict[int, int] = {}  # by thread: the first event of a proof that has not ended

    def find(rows: Rows) -> None:
        for row in rows[(rows["op"] == op) | (rows["kind"] == PHASE)]:
            event, thread = int(row["event"]), int(row["thread"])
            if row["kind"] != PHASE:
                begun.setdefault(thread, event)
            elif thread in begun:
                spans.append((begun.pop(thread), event))

    if op is not None:
        events.for_each_chunk(find)
    return [*spans, *((first, sys.maxsize) for first in begun.values())]


def encode_names(ids: npt.NDArray[Any], name: Callable[[int], str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Encodes ids as indices into a list of the names that occur, for a dictionary column."""
    used, indices = np.unique(ids, return_inverse=True)
    return indices.astype(np.int32), [name(int(id)) for id in used]


@dataclass
class Window:
    """The events around the peak of one device.

    Attributes:
        already_live: the allocations and latest retags of the blocks that are live when the window begins.
        rows: the window's events of blocks, and its failed allocations.
    """

    already_live: Rows = field(default_factory=lambda: np.empty(0, ROW))
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW))


def around_peak(events: Events, max_rows: int) -> dict[int, Window]:
    """Returns the windows by device id. Reads the file twice.

    Args:
        events: the events of the profile.
        max_rows: maximum number of rows in a window. The peak is as near to the middle as the file's ends allow.

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
        index: index of the row with the most live bytes.
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
    """Returns the allocations and latest retags of the blocks that are live after these rows."""
    rows = rows[rows["block"] >= 0]
    rows = rows[~np.isin(rows["block"], rows["block"][rows["kind"] == FREE])]
    kept: npt.NDArray[np.bool_] = rows["kind"] != RETAG
    retags = np.flatnonzero(~kept)[::-1]
    kept[retags[np.unique(rows["block"][retags], return_index=True)[1]]] = True
    result: Rows = rows[kept]
    return result
