# SPDX-License-Identifier: Apache-2.0
"""A timeline of events: the memory in use at each, logged as it happens, reported and exported at the end."""

import json
import logging
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.cells import cell_len
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit import anomalies, readings
from opacus_memprof.toolkit.model import analyze
from opacus_memprof.toolkit.output import MB, LineFile, claim, echo, run_logger
from opacus_memprof.toolkit.report import describe, findings_text
from opacus_memprof.toolkit.snapshots import checked_threshold, take

INITIAL = "initialization"  # the timeline's first line
_NAME_WIDTH = 20  # columns of an event's name in the timeline
_COUNTS = ("allocated", "reserved", "max_allocated", "max_reserved")


class GPUMemoryProfiler:
    """Records the memory in use at events that the program names; on the CPU too, where the log says who counts.

    Args:
        log_dir: where memory_profiler_YYYYMMDD_HHMMSS.log and the other files go; made when the first is written.
        enable_file_logging: whether there is a log file beside the console, and a file of the summary.
        threshold_mb: what may be in use, in MB; a record with more is a warning in the log, and a finding.

    Attributes:
        records: event → its records, each {"time" (seconds since the first record), "allocated", "reserved",
            "max_allocated", "max_reserved" (MB of 2**20 bytes), "timestamp" (ISO 8601)} of the device in use. With
            several devices a record also has "devices", {"cuda:0": the four sizes}.
        log_file: the log's path, or None.

    Raises:
        MemprofError: the log cannot be written, or the threshold is none; from every method but `cleanup`, that the
            profiler was cleaned up.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        enable_file_logging: bool = True,
        threshold_mb: float | None = None,
    ) -> None:
        self.log_dir = Path(log_dir)
        self.threshold_mb = None if threshold_mb is None else checked_threshold(threshold_mb)
        self.records: dict[str, list[dict[str, Any]]] = {}
        self._start: float | None = None  # at the first record
        self._device = readings.primary_device()
        self._history: list[dict[str, Any]] = []
        self._source = ""
        self._described: set[str] = set()
        self._json_file: Path | None = None
        self.log_file: Path | None = None
        stamp = f"_{datetime.now():%Y%m%d_%H%M%S}"
        file = LineFile(self.log_dir, "memory_profiler", ".log") if enable_file_logging else None
        if file is not None:
            self.log_file = file.make()
            stamp = self.log_file.stem.removeprefix("memory_profiler")
        self._log: logging.Logger | None = run_logger(f"MemoryProfiler{stamp}", file)
        self._initial = take()
        self._write_header(self._log)

    def record(self, event: str, extra: object = "") -> None:
        """Records the memory in use now under the event's name; `extra` goes to the log. In a running session it is
        a snapshot in the profile as well."""
        log = self._open_log()
        taken = take(str(event))
        now = time.perf_counter()
        self._start = now if self._start is None else self._start
        elapsed = now - self._start
        sizes = _sizes(taken)
        main = self._main(sizes)
        entry: dict[str, Any] = {"time": elapsed, **main, "timestamp": taken["timestamp"]}
        if len(sizes) > 1:
            entry["devices"] = sizes
        self.records.setdefault(str(event), []).append(entry)
        self._history.append(taken)
        self._log_devices(log, taken)
        self._log_source(log, taken)
        line = (
            f"event: {event} | allocated: {main['allocated']:8.1f}MB | reserved: {main['reserved']:8.1f}MB | "
            f"max allocated: {main['max_allocated']:8.1f}MB | max reserved: {main['max_reserved']:8.1f}MB | "
            f"elapsed: {elapsed:.2f}s"
        )
        log.info(f"{line} | {extra}" if extra != "" else line)
        if len(sizes) > 1:
            for reading in taken["devices"]:
                log.info(f"  {describe(reading)}")
        for found in self._over_threshold(taken):
            log.warning(found.evidence)

    def record_detailed(
        self,
        event: str,
        tensor_info: Mapping[str, Any] | None = None,
        model_info: Mapping[str, Any] | nn.Module | None = None,
    ) -> None:
        """Records an event, and logs what the tensors and the model are.

        Args:
            tensor_info: name → tensor: shape, dtype, device and MB are logged.
            model_info: name → value, logged as they are; or a model, whose parameters are counted.
        """
        self.record(event)
        log = self._open_log()
        for name, tensor in (tensor_info or {}).items():
            log.info(f"  tensor {name}: {_describe_tensor(tensor)}")
        if isinstance(model_info, nn.Module):
            found = analyze(model_info)
            model_info = {
                "total_params": found["total"],
                "trainable_params": found["trainable"],
                "memory_mb": round(found["memory_mb"], 2),
            }
        for name, value in (model_info or {}).items():
            log.info(f"  model {name}: {f'{value:,}' if isinstance(value, (int, float)) else value}")

    def findings(self) -> list[Finding]:
        """Leaks and sudden growth from one record of an event to the next, overuse, fragmentation, and the record that
        exceeds the threshold the most: see `opacus_memprof.toolkit.anomalies`."""
        self._open_log()
        over = (finding for taken in self._history for finding in self._over_threshold(taken))
        return [*anomalies.in_history(self._history), *anomalies.largest(over)]

    def print_report(self) -> None:
        """Prints the timeline: what was in use when the profiler was made, and a line for each record, in order."""
        self._open_log()
        echo(self._timeline())

    def generate_summary_report(self) -> str:
        """The peak and where it came, each event's range, and findings; logged, and with file logging also written
        to memory_summary_*.txt. Returns the text."""
        log = self._open_log()
        text = "\n".join([*self._summary(), findings_text(self.findings())])
        for line in filter(None, text.splitlines()):
            log.info(line)
        if self.log_file is not None:
            write_text(self.log_file.with_name(self._stamped("memory_summary", ".txt")), text)
        return text

    def save_to_json(self, filename: str | os.PathLike[str] | None = None) -> str:
        """Writes `records` (without a name: memory_profiler_*.json in `log_dir`) and returns the path."""
        log = self._open_log()
        if filename is not None:
            path = Path(filename)
        else:
            if self._json_file is None:
                self._json_file = (
                    self.log_file.with_suffix(".json")
                    if self.log_file is not None
                    else claim(self.log_dir, "memory_profiler", ".json")
                )
            path = self._json_file
        write_text(path, json.dumps(self.records, ensure_ascii=False, indent=2) + "\n")
        log.info(f"records: {path}")
        return str(path)

    def cleanup(self) -> None:
        """Closes the log. Again is harmless."""
        self._log = None

    # --- the log and the reports ---

    def _open_log(self) -> logging.Logger:
        if self._log is None:
            raise MemprofError("this profiler was cleaned up: make another GPUMemoryProfiler to go on")
        return self._log

    def _main(self, sizes: Mapping[str, dict[str, float]]) -> dict[str, float]:
        """Of each device's, the sizes that there is room for in one line."""
        return sizes.get(self._device) or next(iter(sizes.values()))

    def _over_threshold(self, taken: Mapping[str, Any]) -> list[Finding]:
        return [found for found in anomalies.in_snapshot(taken, self.threshold_mb) if found.kind == "over_threshold"]

    def _stamped(self, prefix: str, suffix: str) -> str:
        assert self.log_file is not None
        return f"{prefix}{self.log_file.stem.removeprefix('memory_profiler')}{suffix}"

    def _write_header(self, log: logging.Logger) -> None:
        count = torch.cuda.device_count()
        log.info("=" * 80)
        log.info("GPU memory profiler started")
        log.info("=" * 80)
        if self.log_file is not None:
            log.info(f"log file: {self.log_file}")
        log.info(f"CUDA available: {count > 0}")
        log.info(f"GPUs: {count}")
        log.info("sizes in MB of 2^20 bytes and GB of 2^30")
        self._log_devices(log, self._initial)

    def _log_devices(self, log: logging.Logger, taken: Mapping[str, Any]) -> None:
        """Each device once, as soon as it is known: a GPU is not before the program has initialised CUDA."""
        for reading in taken["devices"]:
            device = reading["device"]
            if device in self._described or reading["total_mb"] is None:
                continue
            self._described.add(device)
            name = "" if device == "cpu" else f": {torch.cuda.get_device_name(device)}"
            log.info(f"{anomalies.label(device)}{name} ({reading['total_mb'] / 1024:.1f}GB)")

    def _log_source(self, log: logging.Logger, taken: Mapping[str, Any]) -> None:
        """At the first record, and whenever an allocator was installed or taken out in between."""
        source = _sources(taken)
        if source != self._source:
            self._source = source
            log.info(f"counted: {source}")

    def _rows(self) -> list[tuple[str, Mapping[str, Any]]]:
        rows = [(event, record) for event, records in self.records.items() for record in records]
        return sorted(rows, key=lambda row: float(row[1]["time"]))

    def _timeline(self) -> str:
        lines = ["==== GPU Memory Timeline ====="]
        rows = self._rows()
        if not self._history or _sources(self._initial) == _sources(self._history[0]):  # else it cannot be compared
            rows = [(INITIAL, self._main(_sizes(self._initial))), *rows]
        for event, record in rows:
            name = " ".join(event.splitlines())
            name += " " * (_NAME_WIDTH - cell_len(name))  # a Chinese character takes two columns
            lines.append(f"{name} | Allocated: {record['allocated']:8.1f}MB | Reserved: {record['reserved']:8.1f}MB")
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        rows = self._rows()
        if not rows:
            return ["GPU memory summary: nothing was recorded"]
        first, last = rows[0][1], rows[-1][1]
        peak = max(record["max_allocated"] for _, record in rows)
        at = next(event for event, record in rows if record["max_allocated"] == peak)
        lines = [
            f"GPU memory summary: {len(rows)} records of {len(self.records)} events in {last['time']:.2f}s",
            f"counted: {self._source}",
            f"device: {self._device}",
            f"peak: {peak:.1f}MB allocated, {last['max_reserved']:.1f}MB reserved, reached by the event {at}",
            f"from first to last record: {last['allocated'] - first['allocated']:+.1f}MB",
        ]
        largest = sorted(readings.peak_categories(self._device).items(), key=lambda item: -item[1])
        lines += [f"  at the peak, {category}: {size / MB:.2f}MB" for category, size in largest]
        for event, records in self.records.items():
            sizes = [record["allocated"] for record in records]
            lines.append(f"{event}: {len(records)} records, {min(sizes):.1f}MB to {max(sizes):.1f}MB allocated")
        return lines


def _sources(taken: Mapping[str, Any]) -> str:
    return ", ".join(f"{anomalies.label(reading['device'])} by {reading['source']}" for reading in taken["devices"])


def _sizes(taken: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {reading["device"]: {key: reading[f"{key}_mb"] for key in _COUNTS} for reading in taken["devices"]}


def _describe_tensor(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__}, not a tensor"
    gradient = ", requires grad" if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.nbytes / MB:.2f}MB{gradient}"
