# SPDX-License-Identifier: Apache-2.0
"""GPUMemoryProfiler: records the memory in use at named events, logs it, and reports and exports it at the end."""

import json
import logging
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

import torch
from rich.cells import cell_len
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import checked, in_language, localized, tr
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.toolkit import anomalies, readings
from opacus_memprof.toolkit.model import analyze
from opacus_memprof.toolkit.output import MB, LineFile, create_file, echo, make_logger
from opacus_memprof.toolkit.readings import MemorySnapshot
from opacus_memprof.toolkit.snapshots import check_threshold, describe_reading, format_findings, take_snapshot

INITIAL = "initialization"  # the timeline's first line
_NAME_WIDTH = 20  # columns of an event's name in the timeline


class Sizes(TypedDict):
    """The four sizes of a device, in MB of 2**20 bytes."""

    allocated: float
    reserved: float
    max_allocated: float
    max_reserved: float


class _SizesOfDevices(TypedDict, total=False):
    devices: dict[str, Sizes]


class EventRecord(Sizes, _SizesOfDevices):
    """One record of an event: seconds since the first record, and sizes of the device in use.

    With several devices, it has the sizes of all. `timestamp` is in ISO 8601.
    """

    time: float
    timestamp: str


class GPUMemoryProfiler:
    """Records the memory in use at events that the program names, on GPUs and on the CPU.

    Args:
        log_dir: the directory of memory_profiler_YYYYMMDD_HHMMSS.log and other files, made with the first of them.
        enable_file_logging: whether to log to a file too, and write the summary to a file.
        threshold_mb: the maximum in use, in MB of 2**20 bytes; a record with more is logged as a warning, and is a
            finding.
        language: "en" or "zh", of log lines, reports and findings; None: the process' language.

    Attributes:
        records: event → its records, each {"time" (seconds since the first record), "allocated", "reserved",
            "max_allocated", "max_reserved" (MB of 2**20 bytes), "timestamp" (ISO 8601)} of the device in use. With
            several devices a record also has "devices", {"cuda:0": the four sizes}.
        log_file: the log's path, or None.

    Raises:
        MemprofError: the log cannot be written, the threshold is negative, or there is no such language. Every method
            except `cleanup` raises it after `cleanup`.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        enable_file_logging: bool = True,
        threshold_mb: float | None = None,
        language: str | None = None,
    ) -> None:
        self.language = None if language is None else checked(language)
        self.log_dir = Path(log_dir)
        self.threshold_mb = None if threshold_mb is None else check_threshold(threshold_mb)
        self.records: dict[str, list[EventRecord]] = {}
        self._start: float | None = None  # at the first record
        self._device = readings.primary_device()
        self._history: list[MemorySnapshot] = []
        self._source = ""
        self._described: set[str] = set()
        self._json_file: Path | None = None
        self.log_file: Path | None = None
        stamp = f"_{datetime.now():%Y%m%d_%H%M%S}"
        file = LineFile(self.log_dir, "memory_profiler", ".log") if enable_file_logging else None
        if file is not None:
            self.log_file = file.make()
            stamp = self.log_file.stem.removeprefix("memory_profiler")
        self._log: logging.Logger | None = make_logger(f"MemoryProfiler{stamp}", file)
        self._initial = take_snapshot()
        with in_language(self.language):
            self._write_header(self._log)

    @localized
    def record(self, event: str, extra: object = "") -> None:
        """Records the memory in use now under the event's name, and logs it with `extra`.

        The profile of a running session gets a snapshot of that name too.
        """
        log = self._open_log()
        snapshot = take_snapshot(str(event))
        now = time.perf_counter()
        self._start = now if self._start is None else self._start
        elapsed = now - self._start
        sizes = _sizes(snapshot)
        main = self._main_sizes(sizes)
        entry: EventRecord = {"time": elapsed, **main, "timestamp": snapshot["timestamp"]}  # type: ignore[typeddict-item]
        if len(sizes) > 1:
            entry["devices"] = sizes
        self.records.setdefault(str(event), []).append(entry)
        self._history.append(snapshot)
        self._log_devices(log, snapshot)
        self._log_source(log, snapshot)
        line = tr(
            "event: {event} | allocated: {allocated:6.1f}MB | reserved: {reserved:6.1f}MB | "
            "max allocated: {max_allocated:6.1f}MB | max reserved: {max_reserved:6.1f}MB | elapsed: {elapsed:.2f}s",
            event=event,
            elapsed=elapsed,
            **main,
        )
        log.info(f"{line} | {extra}" if extra != "" else line)
        if len(sizes) > 1:
            for reading in snapshot["devices"]:
                log.info(f"  {describe_reading(reading)}")
        for finding in self._over_threshold(snapshot):
            log.warning(finding.evidence)

    @localized
    def record_detailed(
        self,
        event: str,
        tensor_info: Mapping[str, Any] | None = None,
        model_info: Mapping[str, Any] | nn.Module | None = None,
    ) -> None:
        """Records an event, and logs descriptions of tensors and of a model.

        Args:
            event: the event's name.
            tensor_info: name → tensor: shape, dtype, device and MB are logged.
            model_info: name → value, logged unchanged; or a model, whose parameters are counted.
        """
        self.record(event)
        log = self._open_log()
        for name, tensor in (tensor_info or {}).items():
            log.info(tr("  tensor {name}: {description}", name=name, description=_describe_tensor(tensor)))
        if isinstance(model_info, nn.Module):
            analysis = analyze(model_info)
            model_info = {
                "total_params": analysis["total"],
                "trainable_params": analysis["trainable"],
                "memory_mb": round(analysis["memory_mb"], 2),
            }
        for name, value in (model_info or {}).items():
            shown = f"{value:,}" if isinstance(value, (int, float)) else value
            log.info(tr("  model {name}: {value}", name=name, value=shown))

    @localized
    def findings(self) -> list[Finding]:
        """Returns the findings among the records: leaks, sudden growth, overuse, fragmentation, and the largest excess.

        The largest excess is the record that exceeds the threshold the most. See `opacus_memprof.toolkit.anomalies`.
        """
        self._open_log()
        over = (finding for snapshot in self._history for finding in self._over_threshold(snapshot))
        return [*anomalies.find_in_history(self._history), *anomalies.largest(over)]

    @localized
    def print_report(self) -> None:
        """Prints the timeline: a line for the start, and one for each record, in order."""
        self._open_log()
        echo(self._timeline())

    @localized
    def generate_summary_report(self) -> str:
        """Returns the text of a summary: the peak and its event, the range of each event, and findings.

        Logs it and, with file logging, writes it to memory_summary_*.txt.
        """
        log = self._open_log()
        text = "\n".join([*self._summary(), format_findings(self.findings())])
        for line in filter(None, text.splitlines()):
            log.info(line)
        if self.log_file is not None:
            write_text(self.log_file.with_name(self._stamped("memory_summary", ".txt")), text)
        return text

    @localized
    def save_to_json(self, filename: str | os.PathLike[str] | None = None) -> str:
        """Writes `records` to a JSON file (default: memory_profiler_*.json in `log_dir`), and returns its path."""
        log = self._open_log()
        if filename is not None:
            path = Path(filename)
        else:
            if self._json_file is None:
                self._json_file = (
                    self.log_file.with_suffix(".json")
                    if self.log_file is not None
                    else create_file(self.log_dir, "memory_profiler", ".json")
                )
            path = self._json_file
        write_text(path, json.dumps(self.records, ensure_ascii=False, indent=2) + "\n")
        log.info(tr("records: {path}", path=path))
        return str(path)

    def cleanup(self) -> None:
        """Closes the log. A second call does nothing."""
        self._log = None

    # --- the log and the reports ---

    def _open_log(self) -> logging.Logger:
        if self._log is None:
            raise MemprofError("this profiler was cleaned up: make another GPUMemoryProfiler to continue")
        return self._log

    def _main_sizes(self, sizes: Mapping[str, Sizes]) -> Sizes:
        """Returns the sizes of the device in use, from those of all devices."""
        return sizes.get(self._device) or next(iter(sizes.values()))

    def _over_threshold(self, snapshot: MemorySnapshot) -> list[Finding]:
        findings = anomalies.find_in_snapshot(snapshot, self.threshold_mb)
        return [finding for finding in findings if finding.kind == "over_threshold"]

    def _stamped(self, prefix: str, suffix: str) -> str:
        assert self.log_file is not None
        return f"{prefix}{self.log_file.stem.removeprefix('memory_profiler')}{suffix}"

    def _write_header(self, log: logging.Logger) -> None:
        count = torch.cuda.device_count()
        log.info("=" * 80)
        log.info(tr("GPU memory profiler started"))
        log.info("=" * 80)
        if self.log_file is not None:
            log.info(tr("log file: {path}", path=self.log_file))
        log.info(tr("CUDA available: {available}", available=count > 0))
        log.info(tr("GPUs: {count}", count=count))
        log.info(tr("sizes in MB of 2^20 bytes and GB of 2^30"))
        self._log_devices(log, self._initial)

    def _log_devices(self, log: logging.Logger, snapshot: MemorySnapshot) -> None:
        """Logs each device once, as soon as its memory is known: for a GPU, after CUDA is initialised."""
        for reading in snapshot["devices"]:
            device = reading["device"]
            if device in self._described or reading["total_mb"] is None:
                continue
            self._described.add(device)
            name = "" if device == "cpu" else f": {torch.cuda.get_device_name(device)}"
            log.info(f"{anomalies.device_label(device)}{name} ({reading['total_mb'] / 1024:.1f}GB)")

    def _log_source(self, log: logging.Logger, snapshot: MemorySnapshot) -> None:
        """Logs the source of the counts, at the first record and whenever it has changed."""
        source = _sources(snapshot)
        if source != self._source:
            self._source = source
            log.info(tr("counted: {source}", source=source))

    def _rows(self) -> list[tuple[str, EventRecord]]:
        rows = [(event, record) for event, records in self.records.items() for record in records]
        return sorted(rows, key=lambda row: float(row[1]["time"]))

    def _timeline(self) -> str:
        lines = ["==== GPU Memory Timeline ====="]
        rows: list[tuple[str, Sizes]] = [*self._rows()]
        if not self._history or _sources(self._initial) == _sources(self._history[0]):  # else it cannot be compared
            rows = [(tr(INITIAL), self._main_sizes(_sizes(self._initial))), *rows]
        for event, record in rows:
            name = " ".join(event.splitlines())
            name += " " * (_NAME_WIDTH - cell_len(name))  # a Chinese character takes two columns
            lines.append(f"{name} | Allocated: {record['allocated']:6.1f}MB | Reserved: {record['reserved']:6.1f}MB")
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        rows = self._rows()
        if not rows:
            return [tr("GPU memory summary: nothing was recorded")]
        first, last = rows[0][1], rows[-1][1]
        peak = max(record["max_allocated"] for _, record in rows)
        peak_event = next(event for event, record in rows if record["max_allocated"] == peak)
        lines = [
            tr(
                "GPU memory summary: {records} records of {events} events in {elapsed:.2f}s",
                records=len(rows),
                events=len(self.records),
                elapsed=last["time"],
            ),
            tr("counted: {source}", source=self._source),
            tr("device: {device}", device=self._device),
            tr(
                "peak: {allocated:.1f}MB allocated, {reserved:.1f}MB reserved, reached by the event {event}",
                allocated=peak,
                reserved=last["max_reserved"],
                event=peak_event,
            ),
            tr("from first to last record: {change:+.1f}MB", change=last["allocated"] - first["allocated"]),
        ]
        largest = sorted(readings.peak_categories(self._device).items(), key=lambda item: -item[1])
        for category, size in largest:
            lines.append(tr("  at the peak, {category}: {size:.2f}MB", category=category, size=size / MB))
        for event, records in self.records.items():
            sizes = [record["allocated"] for record in records]
            lines.append(
                tr(
                    "{event}: {count} records, {lowest:.1f}MB to {highest:.1f}MB allocated",
                    event=event,
                    count=len(records),
                    lowest=min(sizes),
                    highest=max(sizes),
                )
            )
        return lines


def _sources(snapshot: MemorySnapshot) -> str:
    return ", ".join(
        tr(
            "{device} by {source}",
            device=anomalies.device_label(reading["device"]),
            source=tr(reading["source"]),
        )
        for reading in snapshot["devices"]
    )


def _sizes(snapshot: MemorySnapshot) -> dict[str, Sizes]:
    return {
        reading["device"]: {
            "allocated": reading["allocated_mb"],
            "reserved": reading["reserved_mb"],
            "max_allocated": reading["max_allocated_mb"],
            "max_reserved": reading["max_reserved_mb"],
        }
        for reading in snapshot["devices"]
    }


def _describe_tensor(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return tr("{type}, not a tensor", type=type(tensor).__name__)
    gradient = tr(", requires grad") if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}, {tensor.nbytes / MB:.2f}MB{gradient}"
