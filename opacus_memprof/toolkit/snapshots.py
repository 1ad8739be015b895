# SPDX-License-Identifier: Apache-2.0
"""Memory snapshots: taken by a name or around a function, compared, looked at for trouble, and reported. Sizes in MB of
2**20 bytes."""

import gc
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ParamSpec, TypeVar

import torch

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit import anomalies, journal, readings
from opacus_memprof.toolkit.output import LOGGER, MB
from opacus_memprof.toolkit.report import describe, describe_difference, report_text

P = ParamSpec("P")
R = TypeVar("R")


def memory_snapshot(name: str = "snapshot") -> dict[str, Any]:
    """The memory in use now; in a running session it stays in the profile, as a snapshot of this name.

    Returns:
        {"name", "timestamp", "devices": [{"device", "source", "allocated_mb", "reserved_mb", "max_allocated_mb",
        "max_reserved_mb", "total_mb", "utilization_percent", "categories_mb"}], "system": {"total_mb",
        "available_mb", "used_percent"}}. `source` says who counted.
    """
    taken = take(name)
    journal.note("snapshot", taken)
    LOGGER.info(f"memory snapshot: {name}")
    for reading in taken["devices"]:
        LOGGER.info(f"  {describe(reading)}")
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
    journal.note("difference", changes)
    LOGGER.info(f"memory snapshots compared: {before['name']} vs {after['name']}")
    for line in describe_difference(changes):
        LOGGER.info(f"  {line}")
    return changes


def check_memory_status(threshold_mb: float = 1000.0) -> list[Finding]:
    """Warns of devices where more than `threshold_mb` is in use, overuse and fragmentation; returns the findings.

    Raises:
        MemprofError: the threshold is negative or no number.
    """
    findings = anomalies.in_snapshot(take(), checked_threshold(threshold_mb))
    anomalies.log(findings)
    journal.note("finding", *findings)
    if not findings:
        LOGGER.info(f"memory use is within {threshold_mb:.1f}MB")
    return findings


def monitor_function(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, dict[str, Any]]:
    """Calls the function; returns its result, and what its call changed.

    The change is as `change_between` has it, with "duration_s". The function's exceptions pass as they are.

    Raises:
        MemprofError: it cannot be called.
    """
    if not callable(function):
        raise MemprofError(f"cannot monitor a {type(function).__name__}: pass a function and then its arguments")
    name = getattr(function, "__name__", type(function).__name__)
    before = memory_snapshot(f"before {name}")
    start = time.perf_counter()
    result = function(*args, **kwargs)
    duration = time.perf_counter() - start
    return result, {**change_between(before, memory_snapshot(f"after {name}")), "duration_s": duration}


def cleanup_memory() -> dict[str, Any]:
    """Collects garbage and gives cached blocks back to the GPUs; returns what changed, as `compare_snapshots` does."""
    before = take()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    changes = compare(before, take())
    for change in changes["gpu_changes"]:
        LOGGER.info(
            f"cleanup: {anomalies.label(change['device'])} allocated {change['memory_change_mb']:+.1f}MB, "
            f"reserved {change['reserved_change_mb']:+.1f}MB"
        )
    return changes


def generate_report(output_file: str | os.PathLike[str] | None = None) -> str:
    """What the toolkit has seen in this process, as text: the snapshots (the latest 1000) and the memory in use now,
    the models that were analysed, the differences, and everything that was found. Also written to `output_file`; raises
    MemprofError where that cannot be written."""
    history = [*journal.noted("snapshot"), take("now")]
    report = report_text("memory report", history, anomalies.in_history(history))
    if output_file is not None:
        write_text(output_file, report)
    return report


def take(name: str | None = None) -> dict[str, Any]:
    """As `memory_snapshot`, logged and kept nowhere. Without a name: no categories, not in the profile."""
    total, available = readings.system_memory()
    return {
        "name": "now" if name is None else str(name),
        "timestamp": datetime.now().isoformat(),
        "devices": readings.read(None if name is None else str(name)),
        "system": {
            "total_mb": total / MB,
            "available_mb": available / MB,
            "used_percent": 100 * (total - available) / total,
        },
    }


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """As `compare_snapshots`, logged and kept nowhere."""
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
        LOGGER.warning(str(error))
        return {"before": before["name"], "after": after["name"], "gpu_changes": []}


def checked_threshold(threshold_mb: float) -> float:
    """A threshold that is one. Raises MemprofError."""
    if not isinstance(threshold_mb, (int, float)) or not threshold_mb >= 0:
        raise MemprofError(f"a threshold of {threshold_mb!r} MB cannot be exceeded: give a number of MB from 0 on")
    return threshold_mb


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
