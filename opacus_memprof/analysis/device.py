# SPDX-License-Identifier: Apache-2.0
"""One device's part of profile.json: the replay of its events with names in the place of ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.profiles.categories import ACTIVATION_HOOKS, FORWARD_UNDECIDED, PARTS, add_parts

_TOP_OPS = 30
# What a snapshot in snapshots.jsonl says beyond the event file: what the allocator itself counted then.
_RECONCILED = ("allocated_bytes", "reserved_bytes", "rounding", "cached", "outside_pytorch", "remainder")
_BEFORE_ANY_BLOCK: Mapping[str, Any] = {"requested_bytes": 0, "categories": {}, **dict.fromkeys(_RECONCILED)}


def build_device(
    name: str,
    replayed: Mapping[str, Any],
    header: Mapping[str, Any],
    names: Names,
    live: Mapping[str, Any] | None,
    snapshots: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """A device's entry in profile.json, and warnings.

    Args:
        name: as in "cuda:0".
        replayed: one of core.replay's devices.
        header: the event file's.
        live: the live counters' peak of this device, if known.
        snapshots: those of snapshots.jsonl, by number.
    """
    start = header["start_unix_ns"]
    peak, warnings = _peak(name, replayed, names, start)
    if live is not None:
        peak, more = _with_counters(name, peak, live, dropped=header["dropped"] > 0)
        warnings += more
    return {
        "peak": peak,
        "phases": {
            names.phase(id): {"peak_bytes": moment["bytes"], **_place(moment, names, start, "step")}
            for id, moment in replayed["phases"].items()
        },
        "steps": [_step(step, names, start) for step in replayed["steps"]],
        "steps_left_out": replayed["steps_left_out"],
        "snapshots": _snapshots(name, replayed["snapshots"], names, start, snapshots),
        "out_of_memory": [
            {
                "requested_bytes": moment["requested"],
                "live_bytes": moment["bytes"],
                "category": names.public_category(moment["category"]),
                "module": names.module(moment["module"]),
                "op": names.op(moment["op"]),
                **_place(moment, names, start, "step", "phase"),
            }
            for moment in replayed["out_of_memory"]
        ],
        "timeline": timeline(replayed["timeline"], names),
        "end_bytes": replayed["end_bytes"],
    }, warnings


def device_of_counters(
    name: str, live: Mapping[str, Any], snapshots: Mapping[int, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """The entry of a device that had its first block after the event file was full, and warnings; as build_device."""
    peak, warnings = _with_counters(name, {"requested_bytes": 0}, live, dropped=True)
    columns = ("event", "time_ns", "step", "logical_step", "bytes", "phase")
    return {
        "peak": peak,
        "phases": {},
        "steps": [],
        "steps_left_out": 0,
        "snapshots": _with_lines(name, [], snapshots),
        "out_of_memory": [],
        "timeline": {**{column: [] for column in columns}, "categories": {}},
        "end_bytes": 0,  # as of every device, of the part that the file has
    }, warnings


def _place(moment: Mapping[str, Any], names: Names, start: int, *fields: str) -> dict[str, Any]:
    """Where an instant is, and what was live by category."""
    place: dict[str, Any] = {"event": moment["event"], "unix_ns": start + moment["time_ns"]}
    if "step" in fields:
        place |= {"step": moment["step"], "logical_step": moment["logical_step"]}
    if "phase" in fields:
        place["phase"] = names.phase(moment["phase"])
    return place | {"categories": names.categories(moment["categories"])}


def _peak(name: str, replayed: Mapping[str, Any], names: Names, start: int) -> tuple[dict[str, Any], list[str]]:
    moment, modules = replayed["peak"], replayed["modules"]
    categories = names.all_categories(moment["categories"])
    remainder = moment["bytes"] - sum(categories.values())
    peak = {
        "requested_bytes": moment["bytes"],
        "counted_bytes": None,
        "allocated_bytes": None,
        "reserved_bytes": None,
        "rounding": None,
        "cached": None,
        "source": "events",
        **_place(moment, names, start, "step", "phase"),
        "categories": categories,
        "remainder_bytes": remainder,
        ACTIVATION_HOOKS: names.hooks_split(moment["categories"]),
        "shared_captures": {names.module(id): held for id, by_id in modules.items() if (held := _shared(names, by_id))},
        "modules": {names.module(id): names.categories(by_id) for id, by_id in modules.items()},
        "born_in": {
            names.phase(id): names.categories(by_id) for id, by_id in enumerate(replayed["born_in"]) if any(by_id)
        },
        "ops": _largest({names.op(id): names.categories(by_id) for id, by_id in replayed["ops"].items()}, _TOP_OPS),
        "streams": {names.stream(id): names.categories(by_id) for id, by_id in replayed["streams"].items()},
        "threads": {names.thread(id): names.categories(by_id) for id, by_id in replayed["threads"].items()},
        "largest_blocks": [_block(block, names) for block in replayed["largest_blocks"]],
        "newest_blocks": [_block(block, names) for block in replayed["newest_blocks"]],
    }
    if remainder:
        return peak, [f"{name}: the categories at the peak miss {remainder} of {moment['bytes']} bytes"]
    return peak, []


def _shared(names: Names, by_id: Sequence[int]) -> int:
    return names.hooks_split(by_id)["shared_with_autograd"]


def _block(block: Mapping[str, Any], names: Names) -> dict[str, Any]:
    return {
        "bytes": block["bytes"],
        "category": names.public_category(block["category"]),
        "module": names.module(block["module"]),
        "op": names.op(block["op"]),
        "step": block["step"],
        "phase": names.phase(block["phase"]),
    }


def _largest(sizes: Mapping[str, dict[str, int]], count: int) -> dict[str, dict[str, int]]:
    ordered = sorted(sizes.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    return dict(ordered[:count])


def _with_counters(
    name: str, peak: dict[str, Any], live: Mapping[str, Any], *, dropped: bool
) -> tuple[dict[str, Any], list[str]]:
    """The peak with what the allocator counted then, and a warning where events and counters differ."""
    warnings = []
    counted, replayed = live["requested_bytes"], peak["requested_bytes"]
    if counted > replayed and dropped:
        peak = _counters_peak(live)
        warnings.append(
            f"{name}: the peak of {counted} bytes came after the event file was full (peak before: {replayed}); its "
            "breakdown is the live counters', without modules and with forward undecided"
        )
    elif counted != replayed:
        warnings.append(
            f"{name}: the events have a peak of {replayed} requested bytes, the live counters one of {counted}"
        )
        return peak, warnings
    if live["allocated_bytes"] >= 0:
        peak["counted_bytes"] = live["upstream_requested_bytes"]
        # Both without what the program has freed and a side stream still uses.
        peak["allocated_bytes"] = live["allocated_bytes"]
        peak["rounding"] = live["allocated_bytes"] - counted
        if live["reserved_bytes"] >= 0:
            peak["reserved_bytes"] = live["reserved_bytes"]
            peak["cached"] = live["reserved_bytes"] - live["allocated_bytes"]
    return peak, warnings


def _counters_peak(live: Mapping[str, Any]) -> dict[str, Any]:
    categories = add_parts(live["categories"])
    if not categories.get(FORWARD_UNDECIDED, 0):
        categories.pop(FORWARD_UNDECIDED, None)
    return {
        "requested_bytes": live["requested_bytes"],
        "counted_bytes": None,
        "allocated_bytes": None,
        "reserved_bytes": None,
        "rounding": None,
        "cached": None,
        "source": "counters",
        "event": None,
        "unix_ns": live["unix_ns"],
        "step": live["step"],
        "logical_step": None,
        "phase": live["phase"],
        "categories": categories,
        "remainder_bytes": live["requested_bytes"] - sum(categories.values()),
        ACTIVATION_HOOKS: {share: live["categories"].get(category, 0) for category, share in PARTS.items()},
        "shared_captures": {"": live["categories"].get("activation_hooks_shared", 0)},
        "modules": {},
        "born_in": {},
        "ops": {},
        "streams": {},
        "threads": {},
        "largest_blocks": [],
        "newest_blocks": [],
    }


def _step(step: Mapping[str, Any], names: Names, start: int) -> dict[str, Any]:
    return {
        "peak_bytes": step["bytes"],
        "end_bytes": step["end_bytes"],
        "complete": step["complete"],
        **_place(step, names, start, "step", "phase"),
    }


def _snapshots(
    name: str,
    moments: Sequence[Mapping[str, Any]],
    names: Names,
    start: int,
    taken: Mapping[int, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Snapshots as the events have them, with what the allocator counted; the others as `_with_lines` has them."""
    snapshots = []
    for moment in moments:
        snapshot = {
            "index": moment["number"],
            "name": names.op(moment["name"]),
            "requested_bytes": moment["bytes"],
            **_place(moment, names, start, "step", "phase"),
        }
        then = taken.get(moment["number"], {"devices": {}})["devices"].get(name)
        if then is not None:
            snapshot |= {key: then[key] for key in _RECONCILED if key in then}
            if pending := then["categories"].get("pending_free", 0):  # freed as far as events go
                snapshot["requested_bytes"] += pending
                snapshot["categories"]["pending_free"] = pending
        snapshots.append(snapshot)
    return _with_lines(name, snapshots, taken)


def _with_lines(
    name: str, snapshots: Sequence[dict[str, Any]], taken: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """`snapshots`, and by their numbers those that only snapshots.jsonl has of this device: of what a full event file
    has dropped the live counters' figures, and before the device's first block nothing."""
    every = {snapshot["index"]: snapshot for snapshot in snapshots}
    for index, line in taken.items():
        if index not in every:
            then = line["devices"].get(name, _BEFORE_ANY_BLOCK)
            every[index] = {
                **{key: line[key] for key in ("index", "name", "unix_ns", "step", "logical_step")},
                "requested_bytes": then["requested_bytes"],
                "event": None,
                "phase": None,
                "categories": {key: size for key, size in add_parts(then["categories"]).items() if size},
                **{key: then[key] for key in _RECONCILED if key in then},
            }
    return [every[index] for index in sorted(every)]


def thinned(timeline: Mapping[str, Any], together: int) -> dict[str, Any]:
    """A timeline with one row in the place of each `together`: the highest, so that the peak stays."""
    sizes = timeline["bytes"]
    groups = (range(first, min(first + together, len(sizes))) for first in range(0, len(sizes), together))
    kept = [max(rows, key=sizes.__getitem__) for rows in groups]
    return {
        **{name: [column[row] for row in kept] for name, column in timeline.items() if name != "categories"},
        "categories": {name: [column[row] for row in kept] for name, column in timeline["categories"].items()},
    }


def timeline(moments: Sequence[Mapping[str, Any]], names: Names) -> dict[str, Any]:
    """Columns of equal length: each is one field of all rows. `time_ns` counts from the start of the file."""
    rows = [names.categories(moment["categories"]) for moment in moments]
    used = list(dict.fromkeys(category for row in rows for category in row))
    return {
        **{key: [moment[key] for moment in moments] for key in ("event", "time_ns", "step", "logical_step", "bytes")},
        "phase": [names.phase(moment["phase"]) for moment in moments],
        "categories": {category: [row.get(category, 0) for row in rows] for category in used},
    }
