# SPDX-License-Identifier: Apache-2.0
"""Memory snapshots: taken by a name, compared, looked at for trouble, and reported. Sizes in MB of 2**20 bytes."""

import gc
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import torch

from opacus_memprof.errors import MemprofError
from opacus_memprof.files import write_text
from opacus_memprof.toolkit import anomalies, readings
from opacus_memprof.toolkit.output import MB, say

_KEPT = 1000  # of the latest snapshots, for generate_report
_history: deque[dict[str, Any]] = deque(maxlen=_KEPT)


def memory_snapshot(name: str = "snapshot") -> dict[str, Any]:
    """The memory in use now; in a running session it stays in the profile, as a snapshot of this name.

    Returns:
        {"name", "timestamp", "devices": [{"device", "source", "allocated_mb", "reserved_mb", "max_allocated_mb",
        "max_reserved_mb", "total_mb", "utilization_percent", "categories_mb"}], "system": {"total_mb",
        "available_mb", "used_percent"}}. `source` says who counted.
    """
    taken = take(name)
    _history.append(taken)
    say(f"memory snapshot: {name}")
    for reading in taken["devices"]:
        say(f"  {describe(reading)}")
    return taken


def compare_snapshots(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What changed from one snapshot to the other.

    Returns:
        {"before", "after" (their names), "gpu_changes": [{"device", "memory_change_mb", "reserved_change_mb",
        "peak_change_mb", "utilization_change", "categories_change_mb"}], "system_change_mb"}; one entry for each
        device of the snapshots, the CPU where there is no GPU. `utilization_change` is in percentage points, None
        where a device's memory is not known.

    Raises:
        MemprofError: not two snapshots, or ones of different devices or sources.
    """
    changes = compare(before, after)
    say(f"memory snapshots compared: {before['name']} vs {after['name']}")
    for change in changes["gpu_changes"]:
        used = change["utilization_change"]
        also = "" if used is None else f", utilization change {used:+.1f}%"
        say(f"  {anomalies.label(change['device'])}: memory change {change['memory_change_mb']:+.1f}MB{also}")
    return changes


def check_memory_status(threshold_mb: float = 1000.0) -> list[dict[str, Any]]:
    """Warns of devices where more than `threshold_mb` is in use, overuse and fragmentation; returns the findings.

    Raises:
        MemprofError: the threshold is negative or no number.
    """
    findings = anomalies.in_snapshot(take(), checked_threshold(threshold_mb))
    anomalies.log(findings)
    if not findings:
        say(f"memory use is within {threshold_mb:.1f}MB")
    return findings


def cleanup_memory() -> dict[str, Any]:
    """Collects garbage and gives cached blocks back to the GPUs; returns what changed, as `compare_snapshots` does."""
    before = take()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    changes = compare(before, take())
    for change in changes["gpu_changes"]:
        say(
            f"cleanup: {anomalies.label(change['device'])} allocated {change['memory_change_mb']:+.1f}MB, "
            f"reserved {change['reserved_change_mb']:+.1f}MB"
        )
    return changes


def generate_report(output_file: str | os.PathLike[str] | None = None) -> str:
    """The snapshots taken so far (the latest 1000), the memory in use now and what is wrong with it, as text; also
    written to `output_file`. Raises MemprofError where that cannot be written."""
    now = take("now")
    report = report_text("memory report", [*_history, now], anomalies.in_history([*_history, now]))
    if output_file is not None:
        write_text(output_file, report)
    return report


def take(name: str | None = None) -> dict[str, Any]:
    """As `memory_snapshot`, said to nobody and kept by nobody. Without a name: no categories, not in the profile."""
    total, available = readings.system_memory()
    return {
        "name": "now" if name is None else str(name),
        "timestamp": datetime.now().isoformat(),
        "devices": [_in_mb(reading) for reading in readings.read(None if name is None else str(name)).values()],
        "system": {
            "total_mb": total / MB,
            "available_mb": available / MB,
            "used_percent": 100 * (total - available) / total,
        },
    }


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """As `compare_snapshots`, without saying anything."""
    try:
        pairs = [{reading["device"]: reading for reading in snapshot["devices"]} for snapshot in (before, after)]
    except (TypeError, KeyError) as error:
        raise MemprofError("only what memory_snapshot returns can be compared: pass two snapshots") from error
    first, second = pairs
    if first.keys() != second.keys():
        raise MemprofError(
            f"the snapshots are of different devices ({', '.join(first)} and {', '.join(second)}): "
            "compare two of the same machine and session"
        )
    for device in first:
        if first[device]["source"] != second[device]["source"]:
            raise MemprofError(
                f"the snapshots of {device} were counted differently, by {first[device]['source']} and by "
                f"{second[device]['source']}: take both inside or both outside a session"
            )
    return {
        "before": before["name"],
        "after": after["name"],
        "gpu_changes": [_change(first[device], second[device]) for device in first],
        "system_change_mb": before["system"]["available_mb"] - after["system"]["available_mb"],
    }


def change_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """As `compare_snapshots`, around a call whose result must not be lost: where the call itself installed or removed
    the recording allocator, "gpu_changes" is empty and a warning says why."""
    try:
        return compare_snapshots(before, after)
    except MemprofError as error:
        say(str(error), logging.WARNING)
        return {"before": before["name"], "after": after["name"], "gpu_changes": []}


def describe(reading: Mapping[str, Any]) -> str:
    """ "GPU 0: 1234.5MB / 11264.0MB (10.9%)"."""
    of = f" / {reading['total_mb']:.1f}MB ({reading['utilization_percent']:.1f}%)" if reading["total_mb"] else ""
    return f"{anomalies.label(reading['device'])}: {reading['allocated_mb']:.1f}MB{of}"


def report_text(title: str, history: Iterable[Mapping[str, Any]], findings: list[dict[str, Any]]) -> str:
    """A report: who counted, each snapshot in its turn, the categories of the last one, the findings."""
    lines = [title, "=" * len(title)]
    last: Mapping[str, Any] = {}
    for last in history:
        lines += [f"{last['timestamp']}  {last['name']}", *(f"  {describe(reading)}" for reading in last["devices"])]
    for reading in last.get("devices", []):
        lines += ["", f"{anomalies.label(reading['device'])}, counted by {reading['source']}"]
        largest = sorted(reading["categories_mb"].items(), key=lambda item: -item[1])
        lines += [f"  {category:<28}{size:>12.2f}MB" for category, size in largest]
    if last:
        system = last["system"]
        lines += [f"machine: {system['available_mb']:.1f}MB of {system['total_mb']:.1f}MB available"]
    return "\n".join([*lines, "", anomalies.text(findings)])


def checked_threshold(threshold_mb: float) -> float:
    """A threshold that is one. Raises MemprofError."""
    if not isinstance(threshold_mb, (int, float)) or not threshold_mb >= 0:
        raise MemprofError(f"a threshold of {threshold_mb!r} MB cannot be exceeded: give a number of MB from 0 on")
    return threshold_mb


def _in_mb(reading: readings.Reading) -> dict[str, Any]:
    return {
        "device": reading.device,
        "source": reading.source,
        "allocated_mb": reading.allocated / MB,
        "reserved_mb": reading.reserved / MB,
        "max_allocated_mb": reading.max_allocated / MB,
        "max_reserved_mb": reading.max_reserved / MB,
        "total_mb": None if reading.total is None else reading.total / MB,
        "utilization_percent": None if reading.total is None else 100 * reading.allocated / reading.total,
        "categories_mb": {category: size / MB for category, size in reading.categories.items()},
    }


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    used = before["utilization_percent"], after["utilization_percent"]
    if used[0] is None and used[1] is not None:  # CUDA was not initialised: this process used nothing of the device
        used = 0.0, used[1]
    categories = {
        category: after["categories_mb"].get(category, 0.0) - before["categories_mb"].get(category, 0.0)
        for category in {**before["categories_mb"], **after["categories_mb"]}
    }
    return {
        "device": after["device"],
        "memory_change_mb": after["allocated_mb"] - before["allocated_mb"],
        "reserved_change_mb": after["reserved_mb"] - before["reserved_mb"],
        "peak_change_mb": after["max_allocated_mb"] - before["max_allocated_mb"],
        "utilization_change": None if None in used else used[1] - used[0],
        "categories_change_mb": {category: change for category, change in categories.items() if change},
    }
