# SPDX-License-Identifier: Apache-2.0
"""A memory debugger: checkpoints by name, monitoring in the background, and a report of both."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.files import write_text
from opacus_memprof.toolkit import anomalies
from opacus_memprof.toolkit.monitor import Monitor
from opacus_memprof.toolkit.output import append_line, claim, say
from opacus_memprof.toolkit.snapshots import (
    checked_threshold,
    compare_snapshots,
    describe,
    report_text,
    take,
)

DEFAULT_LOG_DIR = "logs/memory_debug"
DEFAULT_INTERVAL = 1.0  # seconds
_KEPT = 100_000  # readings in memory; the file has all


def create_memory_debugger(
    log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR, enable_real_time: bool = False
) -> "MemoryDebugger":
    """A debugger for a `with` block, or for as long as it is needed and then `stop`.

    Args:
        log_dir: where the history and the report go; made when the first is written.
        enable_real_time: whether to monitor from now on, once a second.
    """
    debugger = MemoryDebugger(Path(log_dir))
    if enable_real_time:
        debugger.start_real_time_monitoring()
    return debugger


class MemoryDebugger:
    """See `create_memory_debugger`.

    Attributes:
        memory_history: the snapshots of checkpoints and monitoring (of the name "monitor"), oldest first, the latest
            100 000; may be shortened. memory_history_*.jsonl in `log_dir` has each as a line, from when it was taken.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.memory_history: list[dict[str, Any]] = []
        self._checkpoints: dict[str, dict[str, Any]] = {}
        self._monitor: Monitor | None = None
        self._file: Path | None = None

    def __enter__(self) -> "MemoryDebugger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # --- checkpoints ---

    def create_memory_checkpoint(self, name: str) -> dict[str, Any]:
        """Takes a snapshot by this name; one of the same name before is compared with no more. As `memory_snapshot`."""
        snapshot = take(name)
        self._checkpoints[name] = snapshot
        self._note(snapshot)
        say(f"checkpoint: {name}")
        for reading in snapshot["devices"]:
            say(f"  {describe(reading)}")
        return snapshot

    def compare_checkpoints(self, before: str, after: str) -> dict[str, Any]:
        """What changed between two checkpoints, as `compare_snapshots` has it.

        Raises:
            MemprofError: there is no such checkpoint, or an allocator was installed between them.
        """
        return compare_snapshots(self._checkpoint(before), self._checkpoint(after))

    def _checkpoint(self, name: str) -> dict[str, Any]:
        if name not in self._checkpoints:
            known = ", ".join(f'"{known}"' for known in self._checkpoints) or "none yet"
            raise MemprofError(f'there is no checkpoint "{name}": those there are: {known}')
        return self._checkpoints[name]

    # --- monitoring ---

    def start_real_time_monitoring(self, interval: float = DEFAULT_INTERVAL) -> None:
        """Takes a snapshot every `interval` seconds in the background.

        Raises:
            MemprofError: the interval is not a positive number, or monitoring is on already.
        """
        if self._monitor is not None:
            raise MemprofError("monitoring is on already: stop it first (stop_real_time_monitoring)")
        self._monitor = Monitor(interval, self._note)

    def stop_real_time_monitoring(self) -> None:
        """Ends monitoring; harmless where there is none."""
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    stop = stop_real_time_monitoring

    # --- what it says ---

    def check_memory_anomalies(self, threshold_mb: float = anomalies.GROWTH_MB) -> list[dict[str, Any]]:
        """Leaks, sudden growth by more than `threshold_mb`, overuse and fragmentation in the history; says them too.

        Raises:
            MemprofError: the threshold is negative or no number.
        """
        findings = anomalies.in_history(list(self.memory_history), checked_threshold(threshold_mb))
        anomalies.log(findings)
        return findings

    _check_memory_anomalies = check_memory_anomalies  # the name that scripts know it by

    def generate_memory_report(self, output_file: str | os.PathLike[str] | None = None) -> str:
        """The history and what is wrong in it, as text; written to `output_file` (memory_report.txt in `log_dir`).

        Of monitoring it has the highest reading of each device. Raises MemprofError where it cannot be written.
        """
        history = list(self.memory_history)
        shown = [snapshot for snapshot in history if snapshot["name"] != anomalies.MONITOR]
        monitored = [snapshot for snapshot in history if snapshot["name"] == anomalies.MONITOR]
        report = report_text("memory debugger", [*shown, take("now")], anomalies.in_history(history))
        report += "".join(f"{line}\n" for line in _monitored(monitored))
        path = write_text(self.log_dir / "memory_report.txt" if output_file is None else output_file, report)
        say(f"memory report: {path}")
        return report

    def _note(self, snapshot: dict[str, Any]) -> None:
        self.memory_history.append(snapshot)
        del self.memory_history[:-_KEPT]
        if self._file is None:
            self._file = claim(self.log_dir, "memory_history", ".jsonl")
        append_line(self._file, json.dumps(snapshot, ensure_ascii=False))


def _monitored(snapshots: list[dict[str, Any]]) -> list[str]:
    if not snapshots:
        return []
    lines = [f"monitoring: {len(snapshots)} readings from {snapshots[0]['timestamp']} to {snapshots[-1]['timestamp']}"]
    for device in dict.fromkeys(reading["device"] for snapshot in snapshots for reading in snapshot["devices"]):
        found = [reading for snapshot in snapshots for reading in snapshot["devices"] if reading["device"] == device]
        lines.append(f"  highest, {describe(max(found, key=lambda reading: reading['allocated_mb']))}")
    return lines
