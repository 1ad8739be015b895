# SPDX-License-Identifier: Apache-2.0
"""Writes a snapshot in the format of torch.cuda.memory._snapshot(), for pytorch.org/memory_viz.

torch.cuda._memory_viz reads it too. `category` colours the timeline, as in torch's own profile_plot. `user_metadata`
and `frames` contain the category, module, phase and op of a block. A block that changes its category is freed and
allocated again, as in profile_plot.
"""

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import UNSET, to_builtins

from opacus_memprof.analysis.events import FREE, OOM, RETAG, Names, Rows, Window, around_peak
from opacus_memprof.analysis.profile_view import ProfileView
from opacus_memprof.profiles.files import replacing

MAX_EVENTS = 200_000  # of a device: the viewer keeps each of them
_PROTOCOL = 4  # the newest that the viewer reads
_SEGMENT_GAP = 2**21  # closer blocks share a segment
_POOL = (0, 0)

Entry = dict[str, Any]


class _Block(NamedTuple):
    address: int
    size: int
    stream: int
    category: int
    module: int
    op: int
    phase: int
    step: int


def write_memory_viz(view: ProfileView, path: str | os.PathLike[str]) -> None:
    """Writes the snapshot as a pickle, and replaces `path` atomically.

    `cuda:i` is device i, and the CPU is the device after those (0 without a GPU). A device with more than MAX_EVENTS
    events of blocks is shown around its peak; earlier live blocks are shown as allocated at the beginning.

    The event file has no segments: the snapshot's segments are the address ranges of the blocks. It does not have the
    device's free memory at a failed allocation either, which is 0 in the snapshot.

    Raises:
        MemprofError: events.bin is not readable, or `path` cannot be written.
    """
    profile, events = view.profile, view.events()
    windows = around_peak(events, MAX_EVENTS)
    gpus = max(windows, default=0)
    traces: list[list[Entry]] = [[] for _ in range(gpus + 1)]
    segments: list[Entry] = []
    for device, window in windows.items():
        number = device - 1 if device else gpus
        trace = _Trace(events.names, profile.started_unix_ns)
        trace.replay(window)
        traces[number] = trace.entries
        segments += trace.segments(number)
    snapshot = {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    if profile.events.gaps:
        snapshot["gaps"] = to_builtins(profile.events.gaps)
    if profile.virtual is not UNSET:  # the viewer ignores unknown keys
        snapshot["virtual_gpu"] = to_builtins(profile.virtual)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        pickle.dump(snapshot, file, protocol=_PROTOCOL)


class _Trace:
    """The trace of one device, and the blocks that are live at its end."""

    def __init__(self, names: Names, start_unix_ns: int) -> None:
        self.entries: list[Entry] = []
        self._names = names
        self._start = start_unix_ns
        self._live: dict[int, _Block] = {}
        self._ranges: set[tuple[int, int]] = set()  # of addresses
        self._description = lru_cache(maxsize=None)(self._describe_block)
        self._frame = lru_cache(maxsize=None)(_frame)

    def replay(self, window: Window) -> None:
        """Adds the events of the device."""
        begin = int(window.rows["time_ns"][0])
        for number, block in _blocks(window.already_live):
            self._alloc(number, block, begin)
        for row in _python_rows(window.rows):
            self._add(row)
        # Some versions of the viewer add this category for entries without one, and fail.
        self.entries.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "category": "unknown"})

    def _add(self, row: dict[str, int]) -> None:
        time, number = row["time_ns"], row["block"]
        if row["kind"] == OOM:
            entry = self._entry("oom", _block(row), time)
            del entry["addr"]
            self.entries.append({**entry, "device_free": 0})
        elif row["kind"] == FREE:
            self._free(number, time)
        elif row["kind"] == RETAG:
            before = self._live[number]
            after = before._replace(category=row["category"], module=row["module"])
            if after != before:
                self._free(number, time)
                self._alloc(number, after, time)
        else:
            self._alloc(number, _block(row), time)

    def _alloc(self, number: int, block: _Block, time: int) -> None:
        self._live[number] = block
        self._ranges.add((block.address, block.address + block.size))
        self.entries.append(self._entry("alloc", block, time))

    def _free(self, number: int, time: int) -> None:
        block = self._live.pop(number)
        self.entries.append(self._entry("free_requested", block, time))
        self.entries.append(self._entry("free_completed", block, time))

    def _entry(self, action: str, block: _Block, time: int) -> Entry:
        category, metadata, frames = self._description(*block[3:])
        return {
            "action": action,
            "addr": block.address,
            "size": block.size,
            "stream": block.stream,
            "time_us": (self._start + time) // 1000,
            "frames": frames,
            "category": category,
            "user_metadata": metadata,
            "pool_id": _POOL,
        }

    def _describe_block(
        self, category: int, module: int, op: int, phase: int, step: int
    ) -> tuple[str, str, list[Entry]]:
        """Returns a block's category, its description as JSON, and the same as a stack, the innermost frame first."""
        names = self._names
        facts = {"category": names.reported_category(category), "module": names.module(module)}
        facts |= {"op": names.op(op), "phase": names.phase(phase)}
        path = facts["module"].split(".")
        inside = [".".join(path[:end]) for end in range(len(path), 0, -1)]
        lines = names.is_line(op)
        stack = [
            ("op", "" if lines else facts["op"]),
            ("phase", facts["phase"]),
            *(("module", name) for name in inside),
        ]
        stack.append(("category", facts["category"]))
        frames = [self._frame(kind, name) for kind, name in stack if name]
        if lines:
            frames = [*map(_program_frame, facts["op"].split(" < ")), *frames]
        return facts["category"], json.dumps({**facts, "step": step}), frames

    def segments(self, device: int) -> list[Entry]:
        """Returns the address ranges, with their live blocks and the gaps in between."""
        result: list[Entry] = []
        blocks = sorted(self._live.values())
        index = 0
        for start, end in _merge_ranges(self._ranges):
            first = index
            while index < len(blocks) and blocks[index].address < end:
                index += 1
            result.append(self._segment(device, start, end, blocks[first:index]))
        return result

    def _segment(self, device: int, start: int, end: int, blocks: list[_Block]) -> Entry:
        filled: list[Entry] = []
        place = start
        for block in [*blocks, None]:
            gap = (block.address if block else end) - place
            if gap > 0:
                filled.append({"address": place, "size": gap, "requested_size": 0, "state": "inactive", "frames": []})
            if block:
                size, frames = block.size, self._description(*block[3:])[2]
                state = {"requested_size": size, "state": "active_allocated", "frames": frames}
                filled.append({"address": block.address, "size": size, **state})
                place = block.address + size
        live = sum(block.size for block in blocks)
        return {
            "device": device,
            "address": start,
            "total_size": end - start,
            "allocated_size": live,
            "active_size": live,
            "requested_size": live,
            "stream": blocks[0].stream if blocks else 0,
            "segment_type": "large",
            "segment_pool_id": _POOL,
            "is_expandable": False,
            "frames": [],
            "blocks": filled,
        }


def _frame(kind: str, name: str) -> Entry:
    return {"filename": kind, "line": 0, "name": name}


def _program_frame(line: str) -> Entry:
    """Returns the frame of "train.py:41 in update"."""
    place, _, name = line.partition(" in ")
    filename, _, number = place.rpartition(":")
    return {"filename": filename, "line": int(number), "name": name or "<module>"}


def _python_rows(rows: Rows) -> Iterator[dict[str, int]]:
    """Converts rows to dicts of Python numbers, which a pickle needs."""
    fields = rows.dtype.names or ()
    for values in zip(*(rows[field].tolist() for field in fields), strict=True):
        yield dict(zip(fields, values, strict=True))


def _block(row: Mapping[str, int]) -> _Block:
    memory = (row["address"], row["bytes"], row["stream"])
    return _Block(*memory, row["category"], row["module"], row["op"], row["phase"], row["step"])


def _blocks(rows: Rows) -> Iterator[tuple[int, _Block]]:
    """Yields the blocks of these births and retags, with their numbers, in order of birth."""
    last = {row["block"]: row for row in _python_rows(rows[rows["kind"] == RETAG])}
    for row in _python_rows(rows[rows["kind"] != RETAG]):
        later = last.get(row["block"], row)
        yield row["block"], _block(row)._replace(category=later["category"], module=later["module"])


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorts ranges, and merges ranges that overlap or are closer than _SEGMENT_GAP."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1] + _SEGMENT_GAP:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result
