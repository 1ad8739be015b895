# SPDX-License-Identifier: Apache-2.0
"""Converts the trace of a torch snapshot to records of an event file.

A block lives from `alloc` to `free_completed`. Entries for blocks that are older than the trace are added at its
beginning. With context="all", torch records the stack of a free, otherwise that of the block's allocation.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.stacks import Purpose
from opacus_memprof.profiles import core
from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS, EVENT_BYTES, EVENT_HEADER_BYTES

Array = npt.NDArray[Any]
PurposeOf = Callable[[int, int], Purpose]  # of a stack and metadata

ACTIONS = ("alloc", "free_requested", "free_completed", "oom", "annotate")
_ALLOCATED, _REQUESTED, _COMPLETED, _FAILED, _ANNOTATED = range(5)  # indices of ACTIONS
_OLDER = 5  # a block that is older than the trace
_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}  # of reserved memory
LIVE_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")

# Kinds of events; see csrc/core/event.h.
_KINDS = np.array([1, 3, 2, 8, 3, 7], np.uint64)  # by action: alloc, retag, free, oom, retag, seed
_STEP, _PHASE, _SNAPSHOT = 4, 5, 6
_EVENT_VERSION = 2
_MOST_NAMES = 2**16  # of modules and of ops
_MOST_STREAMS = 2**8

# A trace can have tens of millions of entries: columns are as narrow as their values, and indices have 32 bits.
# `key` is the device and the address.
_ROW = np.dtype([("key", "<u8"), ("size", "<u8"), ("stack", "<u4"), ("purpose", "<i4"), ("stream", "u1")])
_PIECE = 2**18  # rows that are numbered at once

# A temporary that outlives its phase is a result, and so is one that is older than the trace.
_RESULTS = {
    "backward": ("backward_temporaries", "gradients"),
    "optimizer_step": ("optimizer_temporaries", "optimizer_states"),
}
# Bytes of cuBLAS' workspaces as torch allocates them, on GPUs of compute capability 9 and above, and on others.
_CUBLAS_WORKSPACES = (8 * 4096 * 1024, (2 * 4096 + 8 * 16) * 1024)


class _Ids:
    """Numbers names in the order of their first use. Names beyond `most` have the number 0."""

    def __init__(self, names: Sequence[str], most: int) -> None:
        self.names = list(names)
        self._ids = {name: id for id, name in enumerate(names)}
        self._most = most

    def __call__(self, name: str) -> int:
        if name not in self._ids and len(self.names) < self._most:
            self._ids[name] = len(self.names)
            self.names.append(name)
        return self._ids.get(name, 0)

    def of(self, names: Sequence[str], kind: type[np.unsignedinteger[Any]]) -> Array:
        return np.array([self(name) for name in names], kind)


class _Tag(NamedTuple):
    """Columns of records."""

    category: Array
    module: Array
    op: Array  # of a retag, the category before
    phase: Array
    step: Array


class TraceEvents:
    """The events of a trace.

    Args:
        entries: the entries of all devices, in the order of each device's trace.
        blocks: the blocks of the segments when the snapshot was taken, with the fields of entries; `size` is the
            requested one.
        index: returns the index of a string in the snapshot, -1 if it is not there.
        purpose_of: returns what an allocation is for, from its stack and metadata.
        name: the name of the snapshot.

    Attributes:
        records: the records of the event file.
        end_unix_ns: the time of the last entry.
        older_bytes: bytes that were allocated before the trace begins.
        out_of_memory: whether the trace ends with a failed allocation.
        end_bytes: live bytes at the end, by device.
    """

    def __init__(
        self, entries: Array, blocks: Array, index: Callable[[str], int], purpose_of: PurposeOf, name: str
    ) -> None:
        times = _rising_times(entries)
        self._reserving = [
            (entries["device"][found], times[found], sign * entries["size"][found].astype(np.int64))
            for action, sign in _GROWTH.items()
            for found in [np.flatnonzero(entries["action"] == index(action))]
        ]
        actions = np.full(len(entries), -1, np.int8)
        for number, text in enumerate(ACTIONS):
            actions[entries["action"] == index(text)] = number
        chosen = _rows_where(actions >= 0)
        chosen = chosen[np.argsort(times[chosen], kind="stable")]
        self._start_us = int(times.min(initial=np.iinfo(np.int64).max)) if len(times) else 0
        self.end_unix_ns = int(times.max(initial=self._start_us)) * 1000
        self._categories = _Ids(core.BUILTIN_CATEGORIES, 64)
        self._modules, self._ops = _Ids([""], _MOST_NAMES), _Ids([""], _MOST_NAMES)
        self._streams = _Ids([""], _MOST_STREAMS)
        self._name = self._ops(name)
        self._purposes: list[Purpose] = []
        numbers: dict[int, int] = {}

        def purpose(pair: int) -> int:
            self._purposes.append(purpose_of(pair >> 32, pair & 0xFFFFFFFF))
            return len(self._purposes) - 1

        def rows_of(entries: Array, chosen: Array) -> Array:
            rows = np.empty(len(chosen), _ROW)
            for start in range(0, len(chosen), _PIECE):
                some, into = entries[chosen[start : start + _PIECE]], rows[start : start + _PIECE]
                into["key"] = some["device"].astype(np.uint64) << np.uint64(48) | some["address"]
                into["size"], into["stack"] = some["size"], some["stack"]
                pairs = some["stack"].astype(np.uint64) << np.uint64(32) | some["metadata"]
                into["purpose"] = _numbered(pairs, purpose, numbers)
                into["stream"] = _numbered(some["stream"], lambda stream: self._streams(str(stream)), {})
            return rows

        live = rows_of(blocks, np.arange(len(blocks)))
        rows, actions, kept, self._freed, older = _with_older(rows_of(entries, chosen), actions[chosen], live)
        time = np.concatenate([np.zeros(older, np.int64), times[chosen[kept]] - self._start_us])
        failures = np.flatnonzero(actions == _FAILED)
        self.out_of_memory = len(failures) > 0 and not (actions[failures[-1] :] == _ALLOCATED).any()
        self.older_bytes = int(rows["size"][:older].sum())
        self.end_bytes: dict[int, int] = {}
        self.records = self._records(rows, actions, time)

    def names(self) -> dict[str, list[str]]:
        """Returns the content of meta.json: for each kind of id in the events, the names by id."""
        devices = ["cpu", *(f"cuda:{device}" for device in range(max(self.end_bytes, default=0) + 1))]
        return {
            "categories": self._categories.names,
            "phases": list(core.BUILTIN_PHASES),
            "modules": self._modules.names,
            "components": [""] * len(self._modules.names),
            "ops": self._ops.names,
            "threads": ["unknown"],
            "streams": self._streams.names,
            "devices": devices,
        }

    def header(self) -> bytes:
        """Returns the header of the event file, whose clock ticks are nanoseconds."""
        start, count = self._start_us * 1000, len(self.records)
        fields = (b"OMEMPROF", _EVENT_VERSION, EVENT_BYTES, count, 0, max(count, DEFAULT_MAX_EVENTS), 0)
        clock = (0, start, max(self.end_unix_ns - start, 1), max(self.end_unix_ns, start + 1))
        return struct.pack("<8sII9Q", *fields, *clock, 1).ljust(EVENT_HEADER_BYTES, b"\0")

    def reserved_at(self, device: int, unix_ns: int, at_end: int) -> int:
        """Returns the reserved bytes of a device at an instant, from those at the end and the changes since."""
        return at_end - sum(
            int(growth[(devices == device) & (times * 1000 > unix_ns)].sum())
            for devices, times, growth in self._reserving
        )

    def _records(self, rows: Array, action: Array, time_us: Array) -> Array:
        count = len(rows)
        purposes, which = self._purposes, rows["purpose"]
        named = np.array([purpose.named for purpose in purposes], np.bool_)[which]
        category = self._categories.of([purpose.category for purpose in purposes], np.uint8)[which]
        module = self._modules.of([purpose.module for purpose in purposes], np.uint16)[which]
        op = self._ops.of([purpose.line for purpose in purposes], np.uint16)[which]
        born = (action == _ALLOCATED) | (action == _OLDER)
        order, birth, death = _lives(rows, action, born)
        known_phases = {phase: id for id, phase in enumerate(core.BUILTIN_PHASES)}
        phases = np.array([known_phases.get(purpose.phase, -1) for purpose in purposes], np.int8)[which]
        tells = action == _ALLOCATED
        if _frees_have_stacks(rows["stack"], action, order, birth):
            tells |= action == _REQUESTED
            # Of blocks whose allocation is unknown, only what zero_grad frees is known.
            freed, gradients = slice(self._freed), self._categories("gradients")
            category[freed] = np.where(category[freed] == gradients, gradients, self._categories("unattributed"))
            module[freed] = op[freed] = 0
        latest = _last(np.where(tells & (phases >= 0), _rows(count), np.int32(-1)))
        phase = phases[np.maximum(latest, np.argmax(latest >= 0))] if (latest >= 0).any() else np.zeros(count, np.int8)
        del phases, latest
        new_step = _first_of_steps(phase, known_phases)
        inferred = born & ~named
        category[inferred] = self._settle(category, phase, new_step, action == _OLDER, death, known_phases)[inferred]
        category[inferred & self._are_workspaces(rows["size"], category, death)] = self._categories("library_workspace")
        freed_now = action[order] == _COMPLETED
        pending = action[order] == _REQUESTED
        pending[:-1] &= order[1:] != order[:-1] + 1
        category[order[pending]] = self._categories("pending_free")
        # What a block is for, from row to row.
        tags = born[order] | pending | ((action[order] == _ANNOTATED) & named[order])
        tagged = order[_last(np.where(tags, _rows(len(order)), np.int32(-1)))]
        before = np.concatenate([order[:1], tagged[:-1]])
        module[order] = np.where(pending, module[before], module[order])
        category_before, category[order] = category[before], category[tagged]
        module[order], op[order] = module[tagged], np.where(born[order], op[order], category_before)
        op[action == _COMPLETED] = 0
        kept = np.ones(count, np.bool_)
        kept[order] = tags | freed_now
        living = born & (death == count)
        devices = _devices(rows)
        for device in np.flatnonzero(np.bincount(devices)).tolist():
            self.end_bytes[device] = int(rows["size"][living & (devices == device)].sum())
        del order, birth, death, tagged, before, pending, freed_now, tags
        tag = _Tag(category, module, op, phase, np.cumsum(new_step, dtype=np.uint32))
        return self._pack(rows, action, time_us, tag, new_step, kept)

    def _pack(self, rows: Array, action: Array, time_us: Array, tag: "_Tag", new_step: Array, kept: Array) -> Array:
        """Returns the records of the kept rows, with those of steps, phases and the snapshot between them."""
        count, (category, module, op, phase, step) = len(rows), tag
        begins_phase = np.flatnonzero(np.diff(phase, prepend=0))
        begins_step = np.flatnonzero(new_step)
        extra = np.zeros((len(begins_phase) + len(begins_step) + 1, 4), np.uint64)
        at = np.concatenate([begins_step, begins_phase, [count - 1] if count else [0]])
        kinds = np.array([_STEP] * len(begins_step) + [_PHASE] * len(begins_phase) + [_SNAPSHOT])
        size = np.where(kinds == _STEP, step[at], 0)
        ops = np.where(kinds == _SNAPSHOT, self._name, 0)
        phase_of = np.where(kinds == _STEP, phase[np.maximum(at - 1, 0)], phase[at])
        extra[:, 0] = _word(time_us[at] * 1000, kinds, 0)
        extra[:, 1] = _word(0, phase_of, 0)
        extra[:, 2] = _word(size, 0, 0)
        extra[:, 3] = _u(ops) << 16 | _u(step[at]) << 32
        # Extra records come before the row that they are for: a step first, then its phase; the snapshot comes last.
        places = np.concatenate([at[:-1], [count]])
        order = np.lexsort((kinds, places))
        extra, places = extra[order], places[order]
        kept_before = np.cumsum(kept, dtype=np.int32)
        records: Array = np.empty((len(extra) + int(kept.sum()), 4), np.uint64)
        of_rows = np.ones(len(records), np.bool_)
        of_rows[np.append(0, kept_before)[places] + np.arange(len(extra))] = False
        records[~of_rows] = extra
        targets = np.flatnonzero(of_rows)
        chosen = np.flatnonzero(kept)
        for start in range(0, len(chosen), _PIECE):
            part = chosen[start : start + _PIECE]
            words = np.empty((len(part), 4), np.uint64)
            words[:, 0] = _word(time_us[part] * 1000, _KINDS[action[part]], category[part])
            words[:, 1] = _word(rows["key"][part], phase[part], _devices(rows[part]) + 1)
            words[:, 2] = _word(rows["size"][part], rows["stream"][part], 0)
            words[:, 3] = _u(module[part]) | _u(op[part]) << 16 | _u(step[part]) << 32
            records[targets[start : start + _PIECE]] = words
        return records

    def _settle(
        self, category: Array, phase: Array, new_step: Array, older: Array, death: Array, phases: dict[str, int]
    ) -> Array:
        """Returns the categories, corrected for blocks whose purpose only their later life reveals."""
        settled: Array = category.copy()
        count = len(phase)
        next_step = _next(new_step)
        for name, (temporary, result) in _RESULTS.items():
            ends = _next(phase != phases[name])
            if name == "optimizer_step":  # of which only frees may be left at the beginning
                ends = np.where(older, next_step, ends)
            is_result = ((ends < death) & (ends < count)) | (older & (death == count))
            settled[is_result & (category == self._categories(temporary))] = self._categories(result)
        # Blocks of a forward pass that later steps still hold are not activations.
        forward = category == self._categories("forward_undecided")
        settled[forward & (next_step < death)] = self._categories("unattributed")
        settled[forward & older & (next_step >= death)] = self._categories("activations")
        return settled

    def _are_workspaces(self, size: Array, category: Array, death: Array) -> Array:
        """Returns which results of a backward pass are cuBLAS' workspaces.

        The first product of a thread allocates one that stays. A gradient has the size of its parameter.
        """
        parameters = size[category == self._categories("model_parameters")]
        stays = (category == self._categories("gradients")) & (death == len(size))
        found: Array = stays & np.isin(size, _CUBLAS_WORKSPACES) & ~np.isin(size, parameters)
        return found


def _with_older(rows: Array, action: Array, live: Array) -> tuple[Array, Array, Array, int, int]:
    """Adds an entry at the beginning for each block that is older than the trace.

    Returns:
        The rows and their actions, which of the given rows are among them, and how many come first that the trace
        frees, and how many that are older.
    """
    order = _by_block(rows, action)
    acts, keys = action[order], rows["key"][order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (keys[1:] != keys[:-1]) | (acts[1:] == _ALLOCATED) | (acts[:-1] == _COMPLETED)
    first = np.flatnonzero(begins)
    block = np.cumsum(begins, dtype=np.int32) - 1
    has = [np.bincount(block[acts == kind], minlength=len(first)) > 0 for kind in (_ALLOCATED, _REQUESTED, _COMPLETED)]
    allocated, requested, completed = has
    # A block that is only annotated is described by its segment. An awaited free is the only entry with the others.
    unknown = ~allocated & ~requested & ~completed
    older = np.flatnonzero(~allocated & ~unknown)
    describes = np.full(len(first), -1, np.int32)
    for kind in (_COMPLETED, _REQUESTED):
        found = np.flatnonzero(acts == kind)
        describes[block[found]] = order[found]
    open_keys = keys[first[~completed & ~unknown]]
    remaining = live[~np.isin(live["key"], open_keys)]
    added = np.concatenate([rows[describes[older]], remaining])
    kept = np.ones(len(rows), np.bool_)
    # Annotations before the only seed of a block come after it now; those of unknown blocks whose seed exists, too.
    annotations = order[unknown[block]]
    kept[annotations] = np.isin(rows["key"][annotations], remaining["key"])
    actions = np.concatenate([np.full(len(added), _OLDER, np.int8), action[kept]])
    return np.concatenate([added, rows[kept]]), actions, kept, len(older), len(added)


def _lives(rows: Array, action: Array, born: Array) -> tuple[Array, Array, Array]:
    """Returns the rows in the order of blocks, the row of each block's birth, and by row of birth that of its end.

    A block that is never freed ends at the number of rows.
    """
    order = _by_block(rows, action)
    birth = order[_last(np.where(born[order], _rows(len(order)), np.int32(-1)))]
    death = np.full(len(rows), len(rows), np.int32)
    freed = action[order] == _COMPLETED
    death[birth[freed]] = order[freed]
    return order, birth, death


def _frees_have_stacks(stacks: Array, action: Array, order: Array, birth: Array) -> bool:
    """Returns whether frees have stacks of their own, instead of those of their allocations.

    Looks at `free_requested` entries. The stack of `free_completed` can differ for another reason: the allocator
    was waiting for a side stream.
    """
    freed = (action[order] == _REQUESTED) & (action[birth] == _ALLOCATED)
    return bool((stacks[order[freed]] != stacks[birth[freed]]).any())


def _by_block(rows: Array, action: Array) -> Array:
    """Returns the indices of rows about blocks, sorted by address and then in the order of the events."""
    chosen = _rows_where(action != _FAILED)
    result: Array = chosen[np.argsort(rows["key"][chosen], kind="stable")]
    return result


def _devices(rows: Array) -> Array:
    devices: Array = (rows["key"] >> np.uint64(48)).astype(np.uint8)
    return devices


def _rows(count: int) -> Array:
    return np.arange(count, dtype=np.int32)


def _rows_where(mask: Array) -> Array:
    return np.flatnonzero(mask).astype(np.int32)


def _numbered(values: Array, number: Callable[[int], int], known: dict[int, int]) -> Array:
    """Returns the number of each value; `known` has the numbers so far."""
    distinct, which = np.unique(values, return_inverse=True)
    for value in distinct.tolist():
        if value not in known:
            known[value] = number(value)
    return np.array([known[value] for value in distinct.tolist()])[which]


def _rising_times(entries: Array) -> Array:
    """Returns the times of entries in microseconds; they rise for each device. Without times, entries are counted."""
    times = entries["time_us"].astype(np.int64)
    if not times.any():
        return np.arange(len(entries))
    for device in np.unique(entries["device"]).tolist():
        here = entries["device"] == device
        times[here] = np.maximum.accumulate(times[here])
    return times


def _last(indices: Array) -> Array:
    """Returns for each place the largest index so far."""
    result: Array = np.maximum.accumulate(indices)
    return result


def _next(chosen: Array) -> Array:
    """Returns for each place the first chosen one from there on; their number if there is none."""
    indices = np.where(chosen, _rows(len(chosen)), np.int32(len(chosen)))
    result: Array = np.minimum.accumulate(indices[::-1])[::-1]
    return result


def _first_of_steps(phase: Array, phases: dict[str, int]) -> Array:
    """Returns which rows begin a step: the first of a forward or backward pass after an optimizer's step.

    An optimizer may leave no trace: then each forward pass after a backward pass begins a step.
    """
    if (ends := (phase == phases["optimizer_step"]) | (phase == phases["zero_grad"])).any():
        begins = (phase == phases["forward"]) | (phase == phases["backward"])
    else:
        ends, begins = phase == phases["backward"], phase == phases["forward"]
    marks = np.where(ends, np.int8(1), np.where(begins, np.int8(2), np.int8(0)))
    last = _last(np.where(marks > 0, _rows(len(marks)), np.int32(-1)))
    previous = np.concatenate([np.full(1, -1, np.int32), last[:-1]])[: len(marks)]
    result: Array = (marks == 2) & (previous >= 0) & (marks[previous] == 1)
    return result


def _u(values: Any) -> Array:
    return np.asarray(values).astype(np.uint64)


def _word(low: Any, sixth: Any, seventh: Any) -> Array:
    result: Array = (_u(low) & np.uint64(2**48 - 1)) | _u(sixth) << np.uint64(48) | _u(seventh) << np.uint64(56)
    return result
