# SPDX-License-Identifier: Apache-2.0
"""A memory debugger: checkpoints by name, monitoring in the background, and a report of both."""

import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit import anomalies, journal
from opacus_memprof.toolkit.output import LOGGER, FileLog, LineFile
from opacus_memprof.toolkit.report import describe, report_text
from opacus_memprof.toolkit.snapshots import checked_threshold, compare_snapshots, take

DEFAULT_LOG_DIR = "logs/memory_debug"
DEFAULT_INTERVAL = 1.0  # seconds
_KEPT = 100_000  # readings in memory; the file has all


def create_memory_debugger(
    log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR, enable_real_time: bool = False
) -> "MemoryDebugger":
    """A debugger for a `with` block, or for as long as it is needed and then `stop`.

    Args:
        log_dir: where the log, the history and the report go; made when the first is written.
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
            100 000; may be shortened. memory_history_*.jsonl in `log_dir` has each as a line, from when it was taken,
            and memory_debug_*.log beside it what the toolkit has logged until `stop`.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.memory_history: list[dict[str, Any]] = []
        self._checkpoints: dict[str, dict[str, Any]] = {}
        self._monitor: _Monitor | None = None
        self._threshold_mb: float | None = None
        self._file = LineFile(log_dir, "memory_history", ".jsonl")
        self._lock = threading.Lock()  # the monitor's thread adds to the history as well
        self._begun = time.monotonic()
        log = FileLog(LineFile(log_dir, "memory_debug", ".log"))
        LOGGER.addHandler(log)
        self._end_log = weakref.finalize(self, LOGGER.removeHandler, log)

    def __enter__(self) -> "MemoryDebugger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends monitoring and the log; again is harmless."""
        self.stop_real_time_monitoring()
        self._end_log()

    # --- checkpoints ---

    def create_memory_checkpoint(self, name: str) -> dict[str, Any]:
        """Takes a snapshot by this name; one of the same name before is compared with no more. As `memory_snapshot`."""
        snapshot = take(name)
        self._checkpoints[name] = snapshot
        self._add(snapshot)
        journal.note("snapshot", snapshot)
        LOGGER.info(f"checkpoint: {name}")
        for reading in snapshot["devices"]:
            LOGGER.info(f"  {describe(reading)}")
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
        """Takes a snapshot every `interval` seconds in the background; where it did before, at this interval instead.

        Raises:
            MemprofError: the interval is not a positive number.
        """
        monitor = _Monitor(interval, self._add)
        self.stop_real_time_monitoring()
        self._monitor = monitor

    def stop_real_time_monitoring(self) -> None:
        """Ends monitoring; harmless where there is none."""
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    # --- what it finds ---

    def check_memory_anomalies(self, threshold_mb: float = anomalies.GROWTH_MB) -> list[Finding]:
        """Leaks, growth between checkpoints by more than `threshold_mb`, overuse and fragmentation in the history. They
        are logged and stand in the reports; the debugger's own report goes by this threshold from then on.

        Raises:
            MemprofError: the threshold is negative or no number.
        """
        self._threshold_mb = checked_threshold(threshold_mb)
        findings = anomalies.in_history(self._history(), self._threshold_mb)
        anomalies.log(findings)
        journal.note("finding", *findings)
        return findings

    _check_memory_anomalies = check_memory_anomalies  # the name that scripts know it by

    def generate_memory_report(self, output_file: str | os.PathLike[str] | None = None) -> str:
        """The history, what is wrong in it, and the models, differences and findings since the debugger was made, as
        text; written to `output_file` (memory_report.txt in `log_dir`).

        Of monitoring it has the highest reading of each device. Raises MemprofError where it cannot be written.
        """
        history = self._history()
        shown = [snapshot for snapshot in history if snapshot["name"] != anomalies.MONITOR]
        monitored = [snapshot for snapshot in history if snapshot["name"] == anomalies.MONITOR]
        findings = anomalies.in_history(history, self._threshold_mb)
        report = report_text("memory debugger", [*shown, take("now")], findings, self._begun)
        report += "".join(f"{line}\n" for line in _monitored(monitored))
        path = write_text(self.log_dir / "memory_report.txt" if output_file is None else output_file, report)
        LOGGER.info(f"memory report: {path}")
        return report

    def _history(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self.memory_history)

    def _add(self, snapshot: dict[str, Any]) -> None:
        with self._lock:
            self.memory_history.append(snapshot)
            del self.memory_history[:-_KEPT]
        self._file.append(json.dumps(snapshot, ensure_ascii=False))


class _Monitor:
    """Calls `note` with a snapshot every `interval` seconds, on a thread of its own, until `stop`.

    The snapshots are cheap ones, without categories. The program's end does not wait for the thread.

    Raises:
        MemprofError: the interval is not a positive number.
    """

    def __init__(self, interval: float, note: Callable[[dict[str, Any]], None]) -> None:
        if not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
            raise MemprofError(f"an interval of {interval!r} s cannot be kept: give a positive number of seconds")
        self._interval = interval
        self._note = note
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="opacus-memprof monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it and waits until it has ended; again is harmless."""
        self._ending.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._ending.wait(self._interval):
                self._note({**take(), "name": anomalies.MONITOR})
        except (MemprofError, RuntimeError) as error:  # a full disk, a broken device: not the program's to die of
            LOGGER.warning(f"monitoring ends: {error}")


def _monitored(snapshots: list[dict[str, Any]]) -> list[str]:
    if not snapshots:
        return []
    lines = [f"monitoring: {len(snapshots)} readings from {snapshots[0]['timestamp']} to {snapshots[-1]['timestamp']}"]
    for device in dict.fromkeys(reading["device"] for snapshot in snapshots for reading in snapshot["devices"]):
        found = [reading for snapshot in snapshots for reading in snapshot["devices"] if reading["device"] == device]
        lines.append(f"  highest, {describe(max(found, key=lambda reading: reading['allocated_mb']))}")
    return lines
