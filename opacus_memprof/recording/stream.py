# SPDX-License-Identifier: Apache-2.0
"""Streams a running session's memory counters to files or Prometheus, for monitoring long runs (docs/frameworks.md).

A thread reads the counters every few seconds and passes them to the sinks. The program waits only while the counters
are copied, which takes microseconds. Nothing is added to the profile.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.live_memory import LiveMemory
from opacus_memprof.recording.faults import contain
from opacus_memprof.recording.live import read_live


class Sink(Protocol):
    """A destination of readings. If it raises it is closed, with a warning in the profile."""

    def open(self) -> None:
        """Called before the first reading. Raises MemprofError if it cannot work; then the session does not start."""

    def write(self, reading: LiveMemory) -> None:
        """Called with each reading."""

    def close(self) -> None:
        """Called after the last reading."""


Target = str | os.PathLike[str] | Sink


def make_sinks(stream: Target | Iterable[Target] | None) -> list[Sink]:
    """Returns the sinks for the argument `stream` of `profile`: one or several targets.

    Raises:
        MemprofError: a target is neither a path, nor an address, nor a Sink.
    """
    if stream is None:
        return []
    is_collection = isinstance(stream, Iterable) and not isinstance(stream, (str, os.PathLike))
    targets: Any = stream if is_collection else [stream]
    return [_make_sink(target) for target in targets]


class Stream:
    """A thread that passes a reading to the sinks every `interval` seconds, and also at the start and at `stop`.

    Args:
        sinks: the sinks from `make_sinks`.
        interval: the interval in seconds.
        warn: called with a sentence about each sink that has failed.

    Raises:
        MemprofError: the interval is not a positive number, or a sink cannot be opened. Then all sinks are closed
            again.
    """

    def __init__(self, sinks: Iterable[Sink], interval: float, warn: Callable[[str], None]) -> None:
        if not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
            raise MemprofError(f"the stream_interval {interval!r} is not possible: give a positive number of seconds")
        self._interval = interval
        self._warn = warn
        self._sinks: list[Sink] = []
        try:
            for sink in sinks:
                self._open(sink)
        except MemprofError:
            self._close(*self._sinks)
            raise
        self._write()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opacus-memprof stream", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the stream after a last reading."""
        self._stopping.set()
        self._thread.join()
        self._write()
        self._close(*self._sinks)

    def _open(self, sink: Sink) -> None:
        try:
            sink.open()
            self._sinks.append(sink)
        except MemprofError:
            raise
        except Exception as error:
            self._warn(f"the stream to {sink} could not be opened ({error})")

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._write()

    @contain("streaming live memory")
    def _write(self) -> None:
        reading = read_live()
        for sink in list(self._sinks):
            try:
                sink.write(reading)
            except Exception as error:  # such as a full disk, which must not end the program
                self._sinks.remove(sink)
                self._warn(f"the stream to {sink} ended at step {reading.step} ({error})")
                self._close(sink)

    def _close(self, *sinks: Sink) -> None:
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                self._warn(f"the stream to {sink} could not be closed ({error})")


def _make_sink(target: Any) -> Sink:
    launch = Launch.from_environment()
    if not isinstance(target, (str, os.PathLike)):
        if not all(hasattr(target, name) for name in ("open", "write", "close")):
            raise _unknown_target(target)
        sink: Sink = target
        return sink
    if str(target).startswith("http://"):
        from opacus_memprof.recording.prometheus import PrometheusServer

        address = urlsplit(str(target))
        try:
            host, port = address.hostname, address.port
        except ValueError:
            host = port = None
        if not host or not port:
            raise _unknown_target(target)
        return PrometheusServer(host, port + (launch.local_rank if launch else 0), read_live)
    path = Path(target)
    if launch is not None:
        path = path.with_name(f"{path.stem}.rank_{launch.rank}{path.suffix}")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".prom":
        from opacus_memprof.recording.prometheus import PrometheusFile

        return PrometheusFile(path)
    raise _unknown_target(target)


def _unknown_target(target: Any) -> MemprofError:
    return MemprofError(
        f"cannot stream to {target!r}: give a file that ends in .jsonl or .prom, or an address such as "
        "http://127.0.0.1:9464"
    )


class JsonLines:
    """A sink that appends to a file, as JSON lines. Categories without bytes are omitted.

    A full file is renamed to `path.1`, replacing an older one. Both together never exceed twice `max_bytes`.

    Args:
        path: the path of the file.
        max_bytes: the maximum size of one file. The default holds about a day of readings, one every ten seconds.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 8 * 2**20) -> None:
        self._path = Path(path).absolute()  # the program may change its working directory
        self._max_bytes = max_bytes
        self._file: FileIO | None = None

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Opens the file, creating its directory. Raises MemprofError if it cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (until close)
        except OSError as error:
            raise MemprofError(f"cannot stream to {self._path} ({error.strerror}): choose another file") from error

    def write(self, reading: LiveMemory) -> None:
        """Appends a line. Raises OSError if it cannot be written.

        The line is one write, so that readers of the file never see an incomplete line unless the disk is full.
        """
        devices = {
            name: replace(device, categories={key: size for key, size in device.categories.items() if size})
            for name, device in reading.devices.items()
        }
        line = msgspec.json.encode(replace(reading, devices=devices)) + b"\n"
        assert self._file is not None
        if self._file.tell() + len(line) > self._max_bytes and self._file.tell():
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._file.write(line)

    def close(self) -> None:
        """Closes the file without removing it."""
        if self._file is not None:
            self._file.close()
