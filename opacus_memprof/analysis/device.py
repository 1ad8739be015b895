# SPDX-License-Identifier: Apache-2.0
"""Builds a device's entry in profile.json from the replay of its events, with names instead of ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from opacus_memprof.analysis.components import Components
from opacus_memprof.analysis.events import Names
from opacus_memprof.profiles.categories import FORWARD_UNDECIDED, add_parts, name_at_failure
from opacus_memprof.profiles.live_memory import DeviceCount, LivePeak, Snapshot
from opacus_memprof.profiles.profile import (
    PROOF,
    Block,
    Device,
    DeviceSnapshot,
    FailedAllocation,
    Groups,
    Peak,
    PhasePeak,
    ReservedPeak,
    StepPeak,
    Timeline,
)

_TOP_OPS = 30
_TOP_LINES = 100
# The attributes of a snapshot that only snapshots.jsonl has: the counts of torch's allocator.
_ALLOCATOR_FIGURES = ("allocated_bytes", "reserved_bytes", "rounding", "cached", "outside_pytorch", "remainder")
_NOT_COUNTED: dict[str, Any] = dict.fromkeys(_ALLOCATOR_FIGURES)
_BEFORE_ANY_BLOCK = DeviceCount(requested_bytes=0, categories={}, **_NOT_COUNTED)

Replayed = Mapping[str, Any]  # a struct of core.replay, see csrc/core/replay.h


def build_device(
    name: str,
    replayed: Replayed,
    header: Replayed,
    names: Names,
    component_of: Components,
    live: LivePeak | None,
    reserved: ReservedPeak | None,
    snapshots: Mapping[int, Snapshot],
    missing: int,
) -> tuple[Device, list[str]]:
    """Builds a device's entry in profile.json. Returns it with warnings.

    Args:
        name: the device, such as "cuda:0".
        replayed: one of core.replay's devices.
        header: the event file's header.
        names: translates ids.
        component_of: maps modules to components.
        live: the live counters' peak of this device, if known.
        reserved: the most bytes that were reserved, as far as meta.json has them; `live` has more.
        snapshots: the snapshots of snapshots.jsonl, by number.
        missing: number of events that the files do not have.
    """
    start = header["start_unix_ns"]
    peak, warnings = _peak(name, replayed, names, component_of, start)
    if live is not None:
        peak, more = _with_counters(name, peak, live, component_of, missing=missing > 0)
        warnings += more
    device = Device(
        peak=peak,
        phases={
            names.phase(id): PhasePeak(
                peak_bytes=instant["bytes"],
                **_when(instant, start),
                categories=names.categories(instant["categories"]),
            )
            for id, instant in replayed["phases"].items()
        },
        steps=[
            StepPeak(
                peak_bytes=step["bytes"],
                end_bytes=step["end_bytes"],
                complete=step["complete"],
                **_instant(step, names, start),
            )
            for step in replayed["steps"]
        ],
        steps_left_out=replayed["steps_left_out"],
        snapshots=_snapshots(name, replayed["snapshots"], names, start, snapshots),
        out_of_memory=[
            FailedAllocation(
                requested_bytes=instant["requested"],
                live_bytes=instant["bytes"],
                category=name_at_failure(names.category(instant["category"])),
                module=names.module(instant["module"]),
                op=names.op(instant["op"]),
                **_instant(instant, names, start),
            )
            for instant in replayed["out_of_memory"]
        ],
        timeline=build_timeline(replayed["timeline"], names),
        end_bytes=replayed["end_bytes"],
        reserved_peak=reserved if live is None else live.reserved_peak,
    )
    return device, warnings


def build_device_from_counters(
    name: str, live: LivePeak, component_of: Components, snapshots: Mapping[int, Snapshot]
) -> tuple[Device, list[str]]:
    """Builds the entry of a device without events. Returns it with warnings."""
    peak, warnings = _with_counters(name, None, live, component_of, missing=True)
    empty = Timeline(event=[], time_ns=[], step=[], logical_step=[], bytes=[], phase=[], categories={})
    device = Device(
        peak=peak,
        phases={},
        steps=[],
        steps_left_out=0,
        snapshots=_with_unrecorded_snapshots(name, [], snapshots),
        out_of_memory=[],
        timeline=empty,
        end_bytes=0,  # of the events that the file has
        reserved_peak=live.reserved_peak,
    )
    return device, warnings


def set_proofs_apart(device: Device, proofs: Sequence[tuple[int, int]], start_unix_ns: int) -> None:
    """Gives instants inside of proofs of flash_clip the phase "proof", of which a step has none but the first few.

    The peak of a phase that was inside of a proof is then that of its highest remaining step, or row of the timeline.

    Args:
        device: an entry of profile.json; changed.
        proofs: from analysis.events.find_proofs.
        start_unix_ns: when recording began.
    """

    def is_inside(event: int | None) -> bool:
        return event is not None and any(first <= event < end for first, end in proofs)

    if not proofs:
        return
    timeline = device.timeline
    timeline.phase = [
        PROOF if is_inside(event) else phase for event, phase in zip(timeline.event, timeline.phase, strict=True)
    ]
    instants: list[Peak | StepPeak | DeviceSnapshot | FailedAllocation]
    instants = [device.peak, *device.steps, *device.snapshots, *device.out_of_memory]
    for instant in instants:
        if is_inside(instant.event):
            instant.phase = PROOF
    proved = {phase: peak for phase, peak in device.phases.items() if is_inside(peak.event)}
    if not proved:
        return
    rows = [
        (timeline.phase[row], _phase_peak(timeline, row, start_unix_ns))
        for row in range(len(timeline.event))
        if timeline.phase[row] in proved
    ]
    steps = [
        (step.phase, PhasePeak(**{key: step[key] for key in PhasePeak.__struct_fields__})) for step in device.steps
    ]
    highest = max(proved.values(), key=lambda peak: peak.peak_bytes)
    for phase in proved:
        others = [peak for of, peak in [*steps, *rows] if of == phase]
        device.phases.pop(phase)
        if others:
            device.phases[phase] = max(others, key=lambda peak: peak.peak_bytes)
    device.phases[PROOF] = highest


def _phase_peak(timeline: Timeline, row: int, start_unix_ns: int) -> PhasePeak:
    return PhasePeak(
        peak_bytes=timeline.bytes[row],
        event=timeline.event[row],
        unix_ns=start_unix_ns + timeline.time_ns[row],
        step=timeline.step[row],
        logical_step=timeline.logical_step[row],
        categories={name: sizes[row] for name, sizes in timeline.categories.items() if sizes[row]},
    )


def _when(instant: Replayed, start: int) -> dict[str, Any]:
    return {
        "event": instant["event"],
        "unix_ns": start + instant["time_ns"],
        "step": instant["step"],
        "logical_step": instant["logical_step"],
    }


def _instant(instant: Replayed, names: Names, start: int) -> dict[str, Any]:
    """Returns the attributes of an instant: its time, and the live bytes by category."""
    phase, categories = names.phase(instant["phase"]), names.categories(instant["categories"])
    return {**_when(instant, start), "phase": phase, "categories": categories}


def _peak(name: str, replayed: Replayed, names: Names, component_of: Components, start: int) -> tuple[Peak, list[str]]:
    instant, modules = replayed["peak"], replayed["modules"]
    categories = names.all_categories(instant["categories"])
    remainder = instant["bytes"] - sum(categories.values())
    by_module = {names.module(id): names.categories(by_id) for id, by_id in modules.items()}
    peak = Peak(
        requested_bytes=instant["bytes"],
        source="events",
        **_when(instant, start),
        phase=names.phase(instant["phase"]),
        categories=categories,
        remainder_bytes=remainder,
        activation_hooks=names.hooked_activations(instant["categories"]),
        shared_captures={names.module(id): size for id, by_id in modules.items() if (size := _shared(names, by_id))},
        modules=by_module,
        born_in={
            names.phase(id): names.categories(by_id) for id, by_id in enumerate(replayed["born_in"]) if any(by_id)
        },
        ops=_ops(replayed["ops"], names, _TOP_OPS, are_lines=False),
        lines=_ops(replayed["ops"], names, _TOP_LINES, are_lines=True),
        streams={names.stream(id): names.categories(by_id) for id, by_id in replayed["streams"].items()},
        threads={names.thread(id): names.categories(by_id) for id, by_id in replayed["threads"].items()},
        largest_blocks=[_block(block, names) for block in replayed["largest_blocks"]],
        newest_blocks=[_block(block, names) for block in replayed["newest_blocks"]],
        **component_of.roll_up(by_module),
    )
    if remainder:
        return peak, [f"{name}: the categories at the peak miss {remainder} of {instant['bytes']} bytes"]
    return peak, []


def _shared(names: Names, by_id: Sequence[int]) -> int:
    return names.hooked_activations(by_id).shared_with_autograd


def _block(block: Replayed, names: Names) -> Block:
    return Block(
        bytes=block["bytes"],
        category=names.reported_category(block["category"]),
        module=names.module(block["module"]),
        op=names.op(block["op"]),
        step=block["step"],
        phase=names.phase(block["phase"]),
    )


def _ops(ops: Mapping[int, Sequence[int]], names: Names, count: int, *, are_lines: bool) -> Groups:
    """Returns the bytes of the `count` largest ops by category: lines of the user's code, or other ops."""
    sizes = {names.op(id): names.categories(by_id) for id, by_id in ops.items() if names.is_line(id) == are_lines}
    ordered = sorted(sizes.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    return dict(ordered[:count])


def _with_counters(
    name: str, peak: Peak | None, live: LivePeak, component_of: Components, *, missing: bool
) -> tuple[Peak, list[str]]:
    """Adds the allocator's own counts to the peak. Returns it with a warning if events and counters differ."""
    warnings = []
    counted, recorded = live.requested_bytes, 0 if peak is None else peak.requested_bytes
    if peak is None or (counted > recorded and missing):
        peak = _counters_peak(live, component_of)
        warnings.append(
            f"{name}: the peak of {counted} bytes is not in the event files (their peak: {recorded}); its breakdown is "
            "the live counters', without modules and with forward undecided"
        )
    elif counted != recorded:
        warnings.append(
            f"{name}: the events have a peak of {recorded} requested bytes, the live counters one of {counted}"
        )
        return peak, warnings
    if live.allocated_bytes is not None:
        peak.counted_bytes = live.counted_bytes
        # Neither includes blocks that the program has freed and a side stream still uses.
        peak.allocated_bytes = live.allocated_bytes
        peak.rounding = live.allocated_bytes - counted
        if live.reserved_bytes is not None:
            peak.reserved_bytes = live.reserved_bytes
            peak.cached = live.reserved_bytes - live.allocated_bytes
    return peak, warnings


def _counters_peak(live: LivePeak, component_of: Components) -> Peak:
    categories = {name: size for name, size in live.categories.items() if size or name != FORWARD_UNDECIDED}
    return Peak(
        requested_bytes=live.requested_bytes,
        source="counters",
        event=None,
        unix_ns=live.unix_ns,
        step=live.step,
        logical_step=None,
        phase=live.phase,
        categories=categories,
        remainder_bytes=live.requested_bytes - sum(categories.values()),
        activation_hooks=live.activation_hooks,
        shared_captures={"": live.activation_hooks.shared_with_autograd},
        modules={},
        born_in={},
        ops={},
        streams={},
        threads={},
        largest_blocks=[],
        newest_blocks=[],
        **component_of.roll_up({}),
    )


def _snapshots(
    name: str, instants: Sequence[Replayed], names: Names, start: int, recorded: Mapping[int, Snapshot]
) -> list[DeviceSnapshot]:
    """Builds all snapshots of a device, with the allocator's own counts."""
    snapshots = []
    for instant in instants:
        snapshot = DeviceSnapshot(
            index=instant["number"],
            name=names.op(instant["name"]),
            requested_bytes=instant["bytes"],
            **_instant(instant, names, start),
        )
        line = recorded.get(snapshot.index)
        counted = None if line is None else line.devices.get(name)
        if counted is not None:
            snapshot = replace(snapshot, **_allocator_figures(counted))
            if pending := counted.categories.get("pending_free", 0):  # freed according to the events
                snapshot.requested_bytes += pending
                snapshot.categories["pending_free"] = pending
        snapshots.append(snapshot)
    return _with_unrecorded_snapshots(name, snapshots, recorded)


def _with_unrecorded_snapshots(
    name: str, snapshots: Sequence[DeviceSnapshot], recorded: Mapping[int, Snapshot]
) -> list[DeviceSnapshot]:
    """Adds the snapshots that only snapshots.jsonl has.

    These are snapshots that a full event file dropped, with the live counters' bytes, and snapshots before the device's
    first block, which are empty.
    """
    by_index = {snapshot.index: snapshot for snapshot in snapshots}
    for index, line in recorded.items():
        if index not in by_index:
            counted = line.devices.get(name, _BEFORE_ANY_BLOCK)
            by_index[index] = DeviceSnapshot(
                index=index,
                name=line.name,
                requested_bytes=counted.requested_bytes,
                event=None,
                unix_ns=line.unix_ns,
                step=line.step,
                logical_step=line.logical_step,
                phase=None,
                categories={key: size for key, size in add_parts(counted.categories).items() if size},
                **_allocator_figures(counted),
            )
    return [by_index[index] for index in sorted(by_index)]


def _allocator_figures(counted: DeviceCount) -> dict[str, Any]:
    return {key: getattr(counted, key) for key in _ALLOCATOR_FIGURES}


def build_timeline(instants: Sequence[Replayed], names: Names) -> Timeline:
    """Builds a Timeline from the rows of core.replay's `timeline`."""
    rows = [names.categories(instant["categories"]) for instant in instants]
    used = list(dict.fromkeys(category for row in rows for category in row))
    return Timeline(
        **{
            key: [instant[key] for instant in instants] for key in ("event", "time_ns", "step", "logical_step", "bytes")
        },
        phase=[names.phase(instant["phase"]) for instant in instants],
        categories={category: [row.get(category, 0) for row in rows] for category in used},
    )
