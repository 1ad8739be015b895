# SPDX-License-Identifier: Apache-2.0
"""Profiles that are made by hand: whole ones, of which a test says only what it is about."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from opacus_memprof.profiles.live_memory import LivePeak
from opacus_memprof.profiles.oom_report import FittingBatch, OomReport, RoomBytes
from opacus_memprof.profiles.profile import Device, Peak, Profile

T = TypeVar("T")

_PLACE = {"event": 0, "unix_ns": 0, "step": 0, "logical_step": 0}
_MOMENT = {**_PLACE, "phase": "idle", "categories": {}}
_EVENTS = {"recorded": 0, "dropped": 0, "capacity": 0, "closed": True, "contradictions": {}}


def structure(kind: type[T], content: object) -> T:
    """Plain JSON, or a structure with other pieces in it, as a structure of this kind."""
    return msgspec.convert(msgspec.to_builtins(content), kind)


def a_peak(**fields: Any) -> Peak:
    groups: dict[str, Any] = {
        key: {} for key in ("modules", "born_in", "ops", "streams", "threads", "components", "module_tree")
    }
    blocks: dict[str, Any] = {"largest_blocks": [], "newest_blocks": []}
    nothing = {"requested_bytes": 0, "source": "events", "remainder_bytes": 0, **blocks}
    hooked = {"activation_hooks": {"shared_with_autograd": 0, "opacus_only": 0}}
    return structure(Peak, _filled({**_MOMENT, **groups, **nothing, **hooked}, fields))


def a_device(**fields: Any) -> Device:
    """`phases`, `steps`, `snapshots` and `out_of_memory` may lack what their kinds have."""
    empty: dict[str, Any] = {"phases": {}, "steps": [], "snapshots": [], "out_of_memory": []}
    columns = ("event", "time_ns", "step", "logical_step", "bytes", "phase")
    given = {**empty, "steps_left_out": 0, "end_bytes": 0, "peak": a_peak(), **fields}
    given.setdefault("timeline", {**{column: [] for column in columns}, "categories": {}})
    step = {"peak_bytes": 0, "end_bytes": 0, "complete": True}
    snapshot = {"index": 0, "name": "", "requested_bytes": 0}
    failure = {"requested_bytes": 0, "live_bytes": 0, "category": "", "module": "", "op": ""}
    given["phases"] = {name: _filled({"peak_bytes": 0, **_PLACE}, phase) for name, phase in given["phases"].items()}
    for key, whole in (("steps", step), ("snapshots", snapshot), ("out_of_memory", failure)):
        given[key] = [_filled({**_MOMENT, **whole}, part) for part in given[key]]
    return structure(Device, given)


def a_profile(**fields: Any) -> Profile:
    times = {"pid": 1, "started_unix_ns": 10, "ended_unix_ns": 20}
    nothing: dict[str, Any] = {"versions": {}, "devices": {}, "findings": [], "warnings": []}
    ended = {"status": "finished", "exit_code": 0}
    return structure(Profile, {**times, **nothing, **ended, "events": _EVENTS, **fields})


def a_live_peak(**fields: Any) -> LivePeak:
    hooked = {"activation_hooks": {"shared_with_autograd": 0, "opacus_only": 0}}
    nobody = dict.fromkeys(("counted_bytes", "allocated_bytes", "reserved_bytes"))
    return structure(LivePeak, {"requested_bytes": 0, **_MOMENT, **hooked, **nobody, **fields})


def an_oom_report(**fields: Any) -> OomReport:
    """`request`, `needed`, `holders`, `room` and `batch` may lack what they have."""
    what = {"category": "noise", "module": "", "op": "", "phase": "noise"}
    parts: dict[str, Any] = {
        "request": {"bytes": 1, "step": 0, "logical_step": 0, "unix_ns": 0, **what},
        "needed": {"bytes": 1, "phase": "noise", "module": "", "parts": {}},
        "holders": {"categories": {}, "modules": {}, "steps": [], "largest": []},
        "left_behind": {"bytes": 0, "categories": {}, "modules": {}, "steps": [], "captures": False},
        "room": {**dict.fromkeys(RoomBytes.__struct_fields__), "rounding": 1.0},
        "batch": {**dict.fromkeys(FittingBatch.__struct_fields__), "unit": "sample"},
    }
    lists: dict[str, Any] = {"layers": [], "suggestions": [], "earlier_failures": []}
    given = {key: _filled(part, fields.pop(key, {})) for key, part in parts.items()}
    return structure(OomReport, {"device": "cuda:0", "live_bytes": 0, "mode": "hooks", **lists, **given, **fields})


def _filled(whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A logical step is the physical one unless said otherwise, as where every step updates the parameters."""
    return {**whole, "logical_step": given.get("step", 0), **given}
