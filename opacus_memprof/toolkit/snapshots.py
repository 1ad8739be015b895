# SPDX-License-Identifier: Apache-2.0
"""Takes, compares and reports memory snapshots. Sizes in MB of 2**20 bytes."""

import gc
import io
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import ParamSpec, TypeVar

import torch
from rich.cells import cell_len
from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.reports.text import print_findings
from opacus_memprof.toolkit import anomalies, model, output, readings
from opacus_memprof.toolkit.output import LOGGER, MB
from opacus_memprof.toolkit.readings import DeviceChange, MemorySnapshot, Reading, SnapshotDifference

P = ParamSpec("P")
R = TypeVar("R")


def memory_snapshot(name: str = "snapshot") -> MemorySnapshot:
    """Takes a snapshot of the memory in use now, and logs it. The profile of a running session contains it too.

    Args:
        name: the snapshot's name.

    Returns:
        {"name", "timestamp", "devices": [{"device", "source", "allocated_mb", "reserved_mb", "max_allocated_mb",
        "max_reserved_mb", "total_mb", "utilization_percent", "categories_mb"}], "system": {"total_mb", "available_mb",
        "used_percent"}}, sizes in MB of 2**20 bytes. `source` is the source of the counts: the recording allocator,
        torch.cuda.memory_stats, or the process' resident memory.
    """
    snapshot = take_snapshot(name)
    output.add_to_journal("snapshot", snapshot)
    LOGGER.info(tr("memory snapshot: {name}", name=name))
    for reading in snapshot["devices"]:
        LOGGER.info(f"  {describe_reading(reading)}")
    return snapshot


def compare_snapshots(before: MemorySnapshot, after: MemorySnapshot) -> SnapshotDifference:
    """Returns the change from one snapshot to another, and logs it.

    Args:
        before: the first snapshot.
        after: the second snapshot.

    Returns:
        {"before", "after" (their names), "gpu_changes": [{"device", "memory_change_mb", "reserved_change_mb",
        "peak_change_mb", "utilization_change", "categories_change_mb"}], "system_change_mb"}; one entry for each device
        of the snapshots, the CPU if there is no GPU. `utilization_change` is in percentage points, None if a device's
        memory is not known.

    Raises:
        MemprofError: these are not two snapshots, or snapshots of different devices or sources.
    """
    changes = difference(before, after)
    output.add_to_journal("difference", changes)
    LOGGER.info(tr("memory snapshots compared: {before} vs {after}", before=before["name"], after=after["name"]))
    for line in describe_difference(changes):
        LOGGER.info(f"  {line}")
    return changes


def check_memory_status(threshold_mb: float = 1000.0) -> list[Finding]:
    """Finds devices where more than `threshold_mb` is in use, overuse and fragmentation, and logs warnings.

    Args:
        threshold_mb: the threshold, in MB of 2**20 bytes.

    Returns:
        The findings, with `kind`, `device`, `bytes`, `evidence` and `remedy`.

    Raises:
        MemprofError: the threshold is negative or not a number.
    """
    findings = anomalies.find_in_snapshot(take_snapshot(), check_threshold(threshold_mb))
    anomalies.log(findings)
    output.add_to_journal("finding", *findings)
    if not findings:
        LOGGER.info(tr("memory use is within {threshold:.1f}MB", threshold=threshold_mb))
    return findings


def monitor_function(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, SnapshotDifference]:
    """Calls the function, and returns its result and the change of the memory in use.

    The change is that of `compare_snapshots` with "duration_s", in seconds. If the call installs or removes the
    recording allocator, "gpu_changes" is empty. The function's exceptions pass unchanged.

    Raises:
        MemprofError: `function` cannot be called.
    """
    if not callable(function):
        raise MemprofError(f"cannot monitor a {type(function).__name__}: pass a function and then its arguments")
    name = getattr(function, "__name__", type(function).__name__)
    before = memory_snapshot(tr("before {name}", name=name))
    start = time.perf_counter()
    result = function(*args, **kwargs)
    duration = time.perf_counter() - start
    change = difference_around_call(before, memory_snapshot(tr("after {name}", name=name)))
    change["duration_s"] = duration
    return result, change


def cleanup_memory() -> SnapshotDifference:
    """Collects garbage and empties the GPUs' caches. Returns the change, as `compare_snapshots` does, and logs it."""
    before = take_snapshot()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    changes = difference(before, take_snapshot())
    for change in changes["gpu_changes"]:
        LOGGER.info(
            tr(
                "cleanup: {device} allocated {allocated:+.1f}MB, reserved {reserved:+.1f}MB",
                device=anomalies.device_label(change["device"]),
                allocated=change["memory_change_mb"],
                reserved=change["reserved_change_mb"],
            )
        )
    return changes


def generate_report(output_file: str | os.PathLike[str] | None = None) -> str:
    """Returns the text of a report on this process.

    It has the latest 1000 snapshots, the memory in use now, model analyses, differences and findings.

    Args:
        output_file: the file to which the report is written; None: no file.

    Raises:
        MemprofError: the file cannot be written.
    """
    history = [*output.journal_since("snapshot"), take_snapshot(tr("now"))]
    report = report_text(tr("memory report"), history, anomalies.find_in_history(history))
    if output_file is not None:
        write_text(output_file, report)
    return report


def take_snapshot(name: str | None = None) -> MemorySnapshot:
    """Does the same as `memory_snapshot`, without log and journal.

    Without a name, the snapshot has no categories and is not in the profile.
    """
    total, available = readings.system_memory()
    return {
        "name": "now" if name is None else str(name),
        "timestamp": datetime.now().isoformat(),
        "devices": readings.read_devices(None if name is None else str(name)),
        "system": {
            "total_mb": total / MB,
            "available_mb": available / MB,
            "used_percent": 100 * (total - available) / total,
        },
    }


def difference(before: MemorySnapshot, after: MemorySnapshot) -> SnapshotDifference:
    """Does the same as `compare_snapshots`, without log and journal.

    Raises:
        MemprofError: see `compare_snapshots`.
    """
    try:
        pairs = [{reading["device"]: reading for reading in snapshot["devices"]} for snapshot in (before, after)]
    except (TypeError, KeyError) as error:
        raise MemprofError("only results of memory_snapshot can be compared: pass two snapshots") from error
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


def difference_around_call(before: MemorySnapshot, after: MemorySnapshot) -> SnapshotDifference:
    """Does the same as `compare_snapshots`, but without errors.

    If a call between the two has installed or removed the recording allocator, "gpu_changes" is empty, and a warning is
    logged.
    """
    try:
        return compare_snapshots(before, after)
    except MemprofError as error:
        LOGGER.warning(str(error))
        return {"before": before["name"], "after": after["name"], "gpu_changes": []}


def check_threshold(threshold_mb: float) -> float:
    """Returns the threshold. Raises MemprofError if it is negative or not a number."""
    if not isinstance(threshold_mb, (int, float)) or not threshold_mb >= 0:
        raise MemprofError(f"the threshold {threshold_mb!r} is not valid: give a number of MB from 0 on")
    return threshold_mb


def _change(before: Reading, after: Reading) -> DeviceChange:
    old, new = before["utilization_percent"], after["utilization_percent"]
    if old is None and new is not None:  # CUDA was not initialised: this process used nothing of the device
        old = 0.0
    categories = {
        category: after["categories_mb"].get(category, 0.0) - before["categories_mb"].get(category, 0.0)
        for category in {**before["categories_mb"], **after["categories_mb"]}
    }
    return {
        "device": after["device"],
        "memory_change_mb": after["allocated_mb"] - before["allocated_mb"],
        "reserved_change_mb": after["reserved_mb"] - before["reserved_mb"],
        "peak_change_mb": after["max_allocated_mb"] - before["max_allocated_mb"],
        "utilization_change": None if old is None or new is None else new - old,
        "categories_change_mb": {category: change for category, change in categories.items() if change},
    }


_WIDTH = 120


def report_text(title: str, history: Iterable[MemorySnapshot], findings: Sequence[Finding], since: float = 0.0) -> str:
    """Returns the text of a report.

    It has all snapshots, the source and categories of the last one, and the models, differences and findings of the
    journal.

    Args:
        title: the title.
        history: snapshots, oldest first.
        findings: findings in the snapshots.
        since: a time of time.monotonic(); older entries of the journal are omitted.
    """
    lines = [title, "=" * cell_len(title), tr("sizes in MB of 2^20 bytes")]
    last: MemorySnapshot | None = None
    sources: dict[str, str] = {}
    for last in history:
        lines.append(f"{last['timestamp']}  {last['name']}")
        for reading in last["devices"]:
            source = sources.get(reading["device"], reading["source"])
            sources[reading["device"]] = reading["source"]
            changed = tr(", counted by {source} from here on", source=tr(reading["source"]))
            lines.append(f"  {describe_reading(reading)}{changed if source != reading['source'] else ''}")
    for reading in last["devices"] if last else ():
        device = anomalies.device_label(reading["device"])
        lines += ["", tr("{device}, counted by {source}", device=device, source=tr(reading["source"]))]
        largest = sorted(reading["categories_mb"].items(), key=lambda item: -item[1])
        lines += [f"  {category:<28}{size:>12.2f}MB" for category, size in largest]
    if last:
        system = last["system"]
        free, total = system["available_mb"], system["total_mb"]
        lines += [tr("machine: {free:.1f}MB of {total:.1f}MB available", free=free, total=total)]
    models = output.journal_since("model", since)
    for analysis in {analysis["name"]: analysis for analysis in models}.values():  # of one name the latest
        lines += ["", *model.describe_model(analysis)]
    differences = output.journal_since("difference", since)
    if differences:
        lines += ["", tr("differences")]
    for difference in differences:
        lines += [f"  {difference['before']} -> {difference['after']}"]
        lines += [f"    {line}" for line in describe_difference(difference)]
    of_models = [finding for analysis in models for finding in analysis["findings"]]
    return "\n".join([*lines, format_findings([*findings, *output.journal_since("finding", since), *of_models])])


def format_findings(findings: Iterable[Finding]) -> str:
    """Returns the text of findings, without repetitions, with their evidence and remedies."""
    distinct = {(finding.kind, finding.device, finding.evidence): finding for finding in findings}
    if not distinct:
        return f"\n{tr('no anomalies')}\n"
    text = io.StringIO()
    print_findings(list(distinct.values()), Console(file=text, width=_WIDTH, force_jupyter=False), count=len(distinct))
    return text.getvalue()


def describe_reading(reading: Reading) -> str:
    """Returns a line such as "GPU 0: 1234.5MB / 11264.0MB (10.9%)"."""
    share = f" / {reading['total_mb']:.1f}MB ({reading['utilization_percent']:.1f}%)" if reading["total_mb"] else ""
    return f"{anomalies.device_label(reading['device'])}: {reading['allocated_mb']:.1f}MB{share}"


def describe_difference(difference: SnapshotDifference) -> list[str]:
    """Returns a line for each device, such as "GPU 0: memory change +456.7MB, utilization change +4.1%"."""
    lines = []
    for change in difference["gpu_changes"]:
        utilization = change["utilization_change"]
        device, size = anomalies.device_label(change["device"]), change["memory_change_mb"]
        line = tr("{device}: memory change {size:+.1f}MB", device=device, size=size)
        if utilization is not None:
            line += tr(", utilization change {utilization:+.1f}%", utilization=utilization)
        lines.append(line)
    return lines
