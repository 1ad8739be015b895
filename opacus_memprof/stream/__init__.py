# SPDX-License-Identifier: Apache-2.0
"""A running session's memory as a stream, for long runs that somebody watches. docs/frameworks.md shows how.

A thread reads the live counters every few seconds and hands them to the sinks. The program waits for it as long as the
counters are copied, microseconds. Nothing is added to the profile.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from opacus_memprof import _native
from opacus_memprof.errors import MemprofError
from opacus_memprof.launch import Launch
from opacus_memprof.profiles.categories import add_parts
from opacus_memprof.stream.json_lines import JsonLines

Reading = dict[str, Any]


class Sink(Protocol):
    """Where readings go. What it raises as OSError or MemprofError ends it, with a warning in the profile."""

    def open(self) -> None:
        """Before the first reading. Raises MemprofError where it cannot work, which refuses the session."""

    def write(self, reading: Reading) -> None:
        """A reading, see `read`."""

    def close(self) -> None:
        """After the last."""


Target = str | os.PathLike[str] | Sink


def read() -> Reading:
    """{"unix_ns", "pid", "rank" (None where there is one process), "step", "logical_step", "devices": {"cuda:0":
    {"requested_bytes", "peak_bytes" (so far), "phase" (of the newest allocation), "categories"}}}, in bytes; the sum of
    `categories` is `requested_bytes`. What a forward pass has made is `forward_undecided`."""
    launch = Launch.from_environment()
    counted = _native.counters()
    for device in counted["devices"].values():
        device["categories"] = add_parts(device["categories"])
    return {"pid": os.getpid(), "rank": None if launch is None else launch.rank, **counted}


def sinks_of(stream: Target | Iterable[Target] | None) -> list[Sink]:
    """What `profile(stream=…)` means.

    Raises:
        MemprofError: a target that is none of these.
    """
    if stream is None:
        return []
    several = isinstance(stream, Iterable) and not isinstance(stream, (str, os.PathLike))
    targets: Any = stream if several else [stream]
    return [_sink(target) for target in targets]


class Stream:
    """Reads every `interval` seconds, at once and at `stop` too.

    Args:
        sinks: from `sinks_of`.
        interval: seconds.
        warn: told of a sink that has ended early.

    Raises:
        MemprofError: the interval is no positive number, or a sink cannot be opened; none is left open.
    """

    def __init__(self, sinks: Iterable[Sink], interval: float, warn: Callable[[str], None]) -> None:
        if not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
            raise MemprofError(f"a stream_interval of {interval!r} s cannot be kept: give a positive number of seconds")
        self._interval = interval
        self._warn = warn
        self._sinks: list[Sink] = []
        try:
            for sink in sinks:
                sink.open()
                self._sinks.append(sink)
        except MemprofError:
            self._close(*self._sinks)
            raise
        self._write()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="opacus-memprof stream", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After a last reading."""
        self._ending.set()
        self._thread.join()
        self._write()
        self._close(*self._sinks)

    def _watch(self) -> None:
        while not self._ending.wait(self._interval):
            self._write()

    def _write(self) -> None:
        reading = read()
        for sink in list(self._sinks):
            try:
                sink.write(reading)
            except (OSError, MemprofError) as error:  # a full disk: not the program's to die of
                self._sinks.remove(sink)
                self._warn(f"the stream to {sink} ended at step {reading['step']} ({error})")
                self._close(sink)

    def _close(self, *sinks: Sink) -> None:
        for sink in sinks:
            try:
                sink.close()
            except (OSError, MemprofError) as error:
                self._warn(f"the stream to {sink} could not be closed ({error})")


def _sink(target: Any) -> Sink:
    launch = Launch.from_environment()
    if not isinstance(target, (str, os.PathLike)):
        if not all(hasattr(target, name) for name in ("open", "write", "close")):
            raise _unknown(target)
        sink: Sink = target
        return sink
    if str(target).startswith("http://"):
        from opacus_memprof.stream.prometheus import PrometheusServer

        address = urlsplit(str(target))
        try:
            host, port = address.hostname, address.port
        except ValueError:
            host = port = None
        if not host or not port:
            raise _unknown(target)
        return PrometheusServer(host, port + (launch.local_rank if launch else 0), read)
    path = Path(target)
    if launch is not None:
        path = path.with_name(f"{path.stem}.rank_{launch.rank}{path.suffix}")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".prom":
        from opacus_memprof.stream.prometheus import PrometheusFile

        return PrometheusFile(path)
    raise _unknown(target)


def _unknown(target: Any) -> MemprofError:
    return MemprofError(
        f"cannot stream to {target!r}: give a file that ends in .jsonl or .prom, or an address such as "
        "http://127.0.0.1:9464"
    )
