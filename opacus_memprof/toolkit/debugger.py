# SPDX-License-Identifier: Apache-2.0
"""MemoryDebugger: named checkpoints, monitoring in the background, and a report of both."""

import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import checked, localized, tr
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit import anomalies, output
from opacus_memprof.toolkit.output import LOGGER, LineFile, LineFileHandler
from opacus_memprof.toolkit.readings import MemorySnapshot, SnapshotDifference
from opacus_memprof.toolkit.snapshots import (
    check_threshold,
    compare_snapshots,
    describe_reading,
    report_text,
    take_snapshot,
)

DEFAULT_LOG_DIR = "logs/memory_debug"
DEFAULT_INTERVAL = 1.0  # seconds
_MAX_SNAPSHOTS = 100_000  # in memory; the file has all


def create_memory_debugger(
    log_dir: str | os.PathLike[str] = DEFAULT_LOG_DIR, enable_real_time: bool = False, language: str | None = None
) -> "MemoryDebugger":
    """Returns a debugger for a `with` block; without one, call `stop` at the end.

    Args:
        log_dir: the directory of the log, the history and the report, created with the first of them.
        enable_real_time: whether to monitor from now on, once a second.
        language: "en" or "zh", of the debugger's log lines and report; None: the process' language.

    Raises:
        MemprofError: there is no such language.
    """
    debugger = MemoryDebugger(Path(log_dir), language)
    if enable_real_time:
        debugger.start_real_time_monitoring()
    return debugger


class MemoryDebugger:
    """The debugger that `create_memory_debugger` returns.

    Attributes:
        memory_history: the snapshots of checkpoints and of monitoring (named "monitor"), oldest first, the latest 100
            000; may be shortened. memory_history_*.jsonl in `log_dir` has a line for each, and memory_debug_*.log has
            the toolkit's log until `stop`.
    """

    def __init__(self, log_dir: Path, language: str | None = None) -> None:
        self.language = None if language is None else checked(language)
        self.log_dir = log_dir
        self.memory_history: list[MemorySnapshot] = []
        self._checkpoints: dict[str, MemorySnapshot] = {}
        self._monitor: _Monitor | None = None
        self._threshold_mb: float | None = None
        self._file = LineFile(log_dir, "memory_history", ".jsonl")
        self._lock = threading.Lock()  # the monitor's thread adds to the history as well
        self._start_time = time.monotonic()
        log = LineFileHandler(LineFile(log_dir, "memory_debug", ".log"))
        LOGGER.addHandler(log)
        self._end_log = weakref.finalize(self, LOGGER.removeHandler, log)

    def __enter__(self) -> "MemoryDebugger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends monitoring and the log. A second call does nothing."""
        self.stop_real_time_monitoring()
        self._end_log()

    @localized
    def create_memory_checkpoint(self, name: str) -> MemorySnapshot:
        """Takes a snapshot, as `memory_snapshot` does. It replaces an earlier checkpoint of the same name."""
        snapshot = take_snapshot(name)
        self._checkpoints[name] = snapshot
        self._add(snapshot)
        output.add_to_journal("snapshot", snapshot)
        LOGGER.info(tr("checkpoint: {name}", name=name))
        for reading in snapshot["devices"]:
            LOGGER.info(f"  {describe_reading(reading)}")
        return snapshot

    @localized
    def compare_checkpoints(self, before: str, after: str) -> SnapshotDifference:
        """Returns the change between two checkpoints; see `compare_snapshots`.

        Raises:
            MemprofError: there is no such checkpoint, or an allocator was installed between them.
        """
        return compare_snapshots(self._checkpoint(before), self._checkpoint(after))

    def _checkpoint(self, name: str) -> MemorySnapshot:
        if name not in self._checkpoints:
            known = ", ".join(f'"{checkpoint}"' for checkpoint in self._checkpoints) or "none yet"
            raise MemprofError(f'there is no checkpoint "{name}": the checkpoints are: {known}')
        return self._checkpoints[name]

    def start_real_time_monitoring(self, interval: float = DEFAULT_INTERVAL) -> None:
        """Takes a snapshot every `interval` seconds in the background. Replaces earlier monitoring.

        Raises:
            MemprofError: the interval is not a positive number.
        """
        monitor = _Monitor(interval, self._add)
        self.stop_real_time_monitoring()
        self._monitor = monitor

    def stop_real_time_monitoring(self) -> None:
        """Ends monitoring, if any."""
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    @localized
    def check_memory_anomalies(self, threshold_mb: float | None = None) -> list[Finding]:
        """Finds leaks, overuse, fragmentation, and growth between checkpoints; with a threshold also use above it.

        The findings are logged and added to reports, and the debugger's own report uses this threshold from now on.

        Args:
            threshold_mb: the maximum growth between two checkpoints, and the maximum in use now, in MB of 2**20 bytes.
                None: growth by at most 200 MB.

        Raises:
            MemprofError: the threshold is negative or not a number.
        """
        self._threshold_mb = anomalies.GROWTH_MB if threshold_mb is None else check_threshold(threshold_mb)
        findings = anomalies.find_in_history(self._history(), self._threshold_mb)
        if threshold_mb is not None:
            now = anomalies.find_in_snapshot(take_snapshot(), threshold_mb)
            findings += [finding for finding in now if finding.kind == "over_threshold"]
        anomalies.log(findings)
        output.add_to_journal("finding", *findings)
        return findings

    _check_memory_anomalies = check_memory_anomalies  # the name that existing scripts use

    @localized
    def generate_memory_report(self, output_file: str | os.PathLike[str] | None = None) -> str:
        """Writes a report and returns its text.

        It has the checkpoints, the highest reading of monitoring for each device, the anomalies among them, and the
        models, differences and findings since the debugger was made.

        Args:
            output_file: the file; default: memory_report.txt in `log_dir`.

        Raises:
            MemprofError: the file cannot be written.
        """
        history = self._history()
        shown = [snapshot for snapshot in history if snapshot["name"] != anomalies.MONITOR]
        monitored = [snapshot for snapshot in history if snapshot["name"] == anomalies.MONITOR]
        findings = anomalies.find_in_history(history, self._threshold_mb)
        report = report_text(tr("memory debugger"), [*shown, take_snapshot(tr("now"))], findings, self._start_time)
        report += "".join(f"{line}\n" for line in _describe_monitoring(monitored))
        path = write_text(self.log_dir / "memory_report.txt" if output_file is None else output_file, report)
        LOGGER.info(tr("memory report: {path}", path=path))
        return report

    def _history(self) -> list[MemorySnapshot]:
        with self._lock:
            return list(self.memory_history)

    def _add(self, snapshot: MemorySnapshot) -> None:
        with self._lock:
            self.memory_history.append(snapshot)
            del self.memory_history[:-_MAX_SNAPSHOTS]
        self._file.append(json.dumps(snapshot, ensure_ascii=False))


class _Monitor:
    """Calls `on_snapshot` with a snapshot every `interval` seconds, in a separate thread, until `stop`.

    The snapshots are cheap ones, without categories. The program's end does not wait for the thread.

    Raises:
        MemprofError: the interval is not a positive number.
    """

    def __init__(self, interval: float, on_snapshot: Callable[[MemorySnapshot], None]) -> None:
        if not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
            raise MemprofError(f"the interval {interval!r} is not possible: give a positive number of seconds")
        self._interval = interval
        self._on_snapshot = on_snapshot
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="opacus-memprof monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits for its end. A second call does nothing."""
        self._ending.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._ending.wait(self._interval):
                self._on_snapshot({**take_snapshot(), "name": anomalies.MONITOR})
        except (MemprofError, RuntimeError) as error:  # such as a full disk: the program continues
            LOGGER.warning(tr("monitoring ends: {error}", error=error))


def _describe_monitoring(snapshots: list[MemorySnapshot]) -> list[str]:
    if not snapshots:
        return []
    first, last = snapshots[0]["timestamp"], snapshots[-1]["timestamp"]
    lines = [tr("monitoring: {count} readings from {first} to {last}", count=len(snapshots), first=first, last=last)]
    for device in dict.fromkeys(reading["device"] for snapshot in snapshots for reading in snapshot["devices"]):
        readings = [reading for snapshot in snapshots for reading in snapshot["devices"] if reading["device"] == device]
        highest = describe_reading(max(readings, key=lambda reading: reading["allocated_mb"]))
        lines.append(tr("  highest, {reading}", reading=highest))
    return lines
