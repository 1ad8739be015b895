# SPDX-License-Identifier: Apache-2.0
"""Readings for Prometheus: a file for node_exporter's textfile collector, or an address to scrape."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opacus_memprof import core
from opacus_memprof.errors import MemprofError

try:
    from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MemprofError(
        f"streaming to Prometheus needs prometheus_client ({error}): pip install prometheus-client"
    ) from None


class _Metrics(Collector):
    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        reading = self._read()
        live = GaugeMetricFamily(
            "opacus_memprof_memory_bytes", "Requested bytes that are live now.", labels=["device", "category"]
        )
        peak = GaugeMetricFamily("opacus_memprof_peak_bytes", "Highest requested bytes so far.", labels=["device"])
        phase = GaugeMetricFamily(
            "opacus_memprof_phase", "1 for the phase of the newest allocation.", labels=["device", "phase"]
        )
        for name, device in reading["devices"].items():
            for category, size in device["categories"].items():
                live.add_metric([name, category], size)
            peak.add_metric([name], device["peak_bytes"])
            for each in core.BUILTIN_PHASES:
                phase.add_metric([name, each], each == device["phase"])
        yield from (live, peak, phase)
        yield GaugeMetricFamily("opacus_memprof_steps", "Calls of optimizer.step that ended.", reading["step"])
        yield GaugeMetricFamily(
            "opacus_memprof_logical_steps", "Steps of the privacy accountant that ended.", reading["logical_step"]
        )


class PrometheusFile:
    """The newest reading, replaced atomically; the file goes when the session ends, and stays when it is killed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._newest: dict[str, Any] = {"devices": {}, "step": 0, "logical_step": 0}
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(lambda: self._newest))

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Makes the directory. Raises MemprofError where the file cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            raise MemprofError(f"cannot stream to {self._path} ({error.strerror}): choose another file") from error

    def write(self, reading: dict[str, Any]) -> None:
        """Raises OSError."""
        self._newest = reading
        write_to_textfile(str(self._path), self._registry)

    def close(self) -> None:
        """A dead process holds no memory."""
        self._path.unlink(missing_ok=True)


class PrometheusServer:
    """Reads when it is asked, and not at intervals: http://host:port/metrics."""

    def __init__(self, host: str, port: int, read: Callable[[], dict[str, Any]]) -> None:
        self._address = (host, port)
        self._registry = CollectorRegistry()
        self._read = read

    def __str__(self) -> str:
        return "http://{}:{}".format(*self._address)

    def open(self) -> None:
        """Raises MemprofError where the port is taken or the host is not this machine."""
        host, port = self._address
        self._registry.register(_Metrics(self._read))
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise MemprofError(f"cannot serve on {self} ({error.strerror}): choose another address") from error

    def write(self, reading: dict[str, Any]) -> None:
        """Nothing: see the class."""

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
