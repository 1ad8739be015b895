# SPDX-License-Identifier: Apache-2.0
"""Publishes readings for Prometheus: in a file for node_exporter's textfile collector, or at an address to scrape."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.live_memory import LiveMemory

try:
    from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MemprofError(
        f"streaming to Prometheus needs prometheus_client ({error}): pip install prometheus-client"
    ) from None


class _Metrics(Collector):
    def __init__(self, read: Callable[[], LiveMemory]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        reading = self._read()
        live = GaugeMetricFamily(
            "opacus_memprof_memory_bytes", "Requested bytes that are live now.", labels=["device", "category"]
        )
        peak = GaugeMetricFamily("opacus_memprof_peak_bytes", "Highest requested bytes so far.", labels=["device"])
        reserved = GaugeMetricFamily(
            "opacus_memprof_reserved_peak_bytes", "Highest reserved bytes so far.", labels=["device"]
        )
        phase = GaugeMetricFamily(
            "opacus_memprof_phase", "1 for the phase of the newest allocation.", labels=["device", "phase"]
        )
        for name, device in reading.devices.items():
            for category, size in device.categories.items():
                live.add_metric([name, category], size)
            peak.add_metric([name], device.peak_bytes)
            if device.reserved_peak is not None:
                reserved.add_metric([name], device.reserved_peak.bytes)
            for phase_name in core.BUILTIN_PHASES:
                phase.add_metric([name, phase_name], phase_name == device.phase)
        yield from (live, peak, reserved, phase)
        yield GaugeMetricFamily("opacus_memprof_steps", "Calls of optimizer.step that ended.", reading.step)
        yield GaugeMetricFamily(
            "opacus_memprof_logical_steps", "Steps of the privacy accountant that ended.", reading.logical_step
        )


class PrometheusFile:
    """A sink that atomically replaces a file by the newest reading.

    The file is removed when the session ends, but not if the process is killed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._newest = LiveMemory(unix_ns=0, pid=os.getpid(), rank=None, step=0, logical_step=0, devices={})
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(lambda: self._newest))

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Writes the file, creating its directory. Raises MemprofError if it cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            raise MemprofError(f"cannot stream to {self._path} ({error.strerror}): choose another file") from error

    def write(self, reading: LiveMemory) -> None:
        """Replaces the file. Raises OSError if it cannot be written."""
        self._newest = reading
        write_to_textfile(str(self._path), self._registry)

    def close(self) -> None:
        """Removes the file, because a process that has ended holds no memory."""
        self._path.unlink(missing_ok=True)


class PrometheusServer:
    """A sink that serves http://host:port/metrics. It reads the counters on each request, not at intervals."""

    def __init__(self, host: str, port: int, read: Callable[[], LiveMemory]) -> None:
        self._address = (host, port)
        self._registry = CollectorRegistry()
        self._read = read

    def __str__(self) -> str:
        return "http://{}:{}".format(*self._address)

    def open(self) -> None:
        """Starts serving. Raises MemprofError if the port is in use or the host is not this machine."""
        host, port = self._address
        self._registry.register(_Metrics(self._read))
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise MemprofError(f"cannot serve on {self} ({error.strerror}): choose another address") from error

    def write(self, reading: LiveMemory) -> None:
        """Does nothing, because each request reads the counters itself."""

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
