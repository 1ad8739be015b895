# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a virtual GPU in a separate process, and reads the outcome. This process needs no torch."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.pool import Processes
from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.profiles.directory import OOM_REPORTS, PROFILE
from opacus_memprof.profiles.files import read_object, writing

LOG = "log.txt"
PROCESS_FILE = "process.json"  # data that the process writes when it ends
PROFILE_OF_RUN = "profile"
PACKAGES = (
    "torch",
    "opacus",
    "torch._dynamo",  # by the first optimizer
    "opacus_memprof.clipping.engine",
    "opacus_memprof.reports.summary",  # not what loads _C, which cannot record in a fork
)
"""What a run imports, before it is forked."""
_PATIENCE_S = 0.5
_SUMMARY = "opacus-memprof  "  # begins the profiler's output after the program's own
_NOTE = "opacus-memprof: "  # begins a line of the profiler's


@dataclass(frozen=True)
class VirtualRun:
    """The outcome of a run. Sizes are in bytes. A value is None if the run ended before it was known.

    Attributes:
        fits: whether the program finished without running out of memory.
        status: "finished", "out_of_memory", "failed" or "killed". `error`: the program's last message, in one line.
        steps: number of completed optimizer steps.
        samples: samples in the largest physical batch.
        requested, reserved: the peaks.
        may_reserve: the GPU's memory without that of CUDA's context and libraries.
        context: memory of CUDA's context and libraries.
        retries: how often torch had to return cached memory to the GPU before an allocation succeeded.
        category, module, phase: of the most bytes at the peak; if memory ran out, of the failed allocation.
        categories: requested bytes at the peak, by category.
        poisson: "samples", "rate" and "steps" of a loader with Poisson sampling; {} without one.
        seconds: duration of the process.
        directory: the directory of the profile and the log.
    """

    fits: bool
    status: str
    error: str
    steps: int
    samples: int | None
    requested: int | None
    reserved: int | None
    may_reserve: int | None
    context: int | None
    retries: int
    category: str
    module: str
    phase: str
    seconds: float
    directory: str
    categories: Mapping[str, int] = field(default_factory=dict)
    poisson: Mapping[str, Any] = field(default_factory=dict)

    @property
    def profile(self) -> Path:
        return Path(self.directory) / PROFILE_OF_RUN

    def oom_report(self) -> dict[str, Any] | None:
        """Returns oom_report.json if the run ran out of memory, otherwise None."""
        file = self.profile / OOM_REPORTS[1]
        return read_object(file) if file.exists() else None

    @property
    def wanted(self) -> int:
        """Bytes that were reserved when memory ran out, and those of the allocation that failed; 0 without a report."""
        report = self.oom_report()
        return 0 if report is None else (report["room"]["reserved_bytes"] or 0) + report["request"]["bytes"]

    def last_line(self) -> str:
        """Returns the last line that the program printed, without the frame of a box; "" if it printed no words."""
        text = (Path(self.directory) / LOG).read_text(encoding="utf-8", errors="replace")
        lines = (line.strip(" \t│") for line in reversed(text.partition(_SUMMARY)[0].splitlines()))
        return next((line for line in lines if any(map(str.isalnum, line)) and not line.startswith(_NOTE)), "")


class ForkedRuns:
    """Runs in processes that are forked, several at once, from a process that has imported torch and Opacus.

    Args:
        environment: the runs' environment variables.
        packages: the packages that are imported once.
    """

    def __init__(self, environment: Mapping[str, str], packages: Sequence[str] = PACKAGES) -> None:
        self._running: set[socket.socket] = set()
        self._closed = False
        self._requests, requests = socket.socketpair()
        with requests:
            descriptor = requests.fileno()
            self._server = subprocess.Popen(
                [sys.executable, "-m", "opacus_memprof.planning.fork_server", str(descriptor), *packages],
                env=environment,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def run(self, configuration: str, directory: Path, log: Path) -> int | None:
        """Runs a configuration. Returns the exit code as subprocess does, or None if this process cannot be forked."""
        request = json.dumps([configuration, str(directory.absolute()), str(log.absolute())])
        connection, other = socket.socketpair()
        answer = b""
        with connection, contextlib.suppress(OSError):
            with other:
                socket.send_fds(self._requests, [b" "], [other.fileno()])
            self._running.add(connection)
            if not self._closed:  # `close` may not have seen it
                connection.sendall(request.encode() + b"\n")
                answer = connection.recv(100)
        self._running.discard(connection)
        if answer:
            return int(answer)
        return -signal.SIGKILL if self._closed else None

    @property
    def answers(self) -> bool:
        """Whether the process runs; it ends by itself if it cannot be forked."""
        return self._server.poll() is None

    def close(self) -> None:
        """Kills the process and the runs in progress."""
        self._closed = True
        for connection in list(self._running):
            with contextlib.suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)
        self._requests.close()
        try:
            self._server.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it imports the packages
            self._server.kill()
            self._server.wait()


def run_virtually(
    configuration: PlannedConfiguration,
    directory: Path,
    threads: int | None = None,
    forked: ForkedRuns | None = None,
    processes: Processes | None = None,
) -> VirtualRun:
    """Runs a program to its end.

    Args:
        configuration: the program and its virtual GPU.
        directory: replaced by the files of this run: profile/, log.txt, process.json.
        threads: number of threads for each library that computes on the CPU; None for the libraries' defaults.
        forked: runs the program, in its environment, instead of a new process.
        processes: starts the new process, and can kill it.

    Raises:
        MemprofError: a virtual GPU cannot work here, the program cannot be found, or the directory cannot be written.
    """
    with writing(directory):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / LOG).touch()
    asked = json.dumps(configuration.to_json())
    start = time.monotonic()
    exit_code = None if forked is None else forked.run(asked, directory, directory / LOG)
    if exit_code is None:
        command = [sys.executable, "-m", "opacus_memprof.planning.run_process", asked, str(directory.absolute())]
        environment = run_environment(configuration, threads)
        exit_code = (processes or Processes()).run(command, environment, directory / LOG)
    return _read(directory, exit_code, time.monotonic() - start)


def run_environment(configuration: PlannedConfiguration, threads: int | None) -> dict[str, str]:
    """Returns the environment variables of a run."""
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # of this machine's own GPUs
    settings = [change["value"] for change in configuration.changes if change["kind"] == "allocator_setting"]
    if settings:
        given = environment.get("PYTORCH_CUDA_ALLOC_CONF")
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ",".join([*([given] if given else []), *settings])
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _read(directory: Path, exit_code: int, seconds: float) -> VirtualRun:
    data = read_object(directory / PROCESS_FILE) if (directory / PROCESS_FILE).exists() else {}
    if refused := data.get("refused"):
        raise MemprofError(str(refused))
    profile: dict[str, Any] = {}
    with contextlib.suppress(MemprofError):  # there is none if the program has not imported torch, or was killed
        profile = read_object(directory / PROFILE_OF_RUN / PROFILE)
    devices = profile.get("devices", {})
    name = next((name for name in devices if name.startswith("cuda")), None)
    device = devices.get(name, {})
    ran_out = (directory / PROFILE_OF_RUN / OOM_REPORTS[1]).exists()
    status = profile.get("status", "killed" if exit_code < 0 else "failed" if exit_code else "finished")
    if ran_out and status in ("finished", "failed"):
        status = "out_of_memory"  # the program has handled it, or failed with a consequence of it
    peak = device.get("peak", {})
    category, module, phase = _largest(peak)
    if ran_out:
        request = read_object(directory / PROFILE_OF_RUN / OOM_REPORTS[1])["request"]
        category, module, phase = request["category"], request["module"], request["phase"]
    return VirtualRun(
        fits=status == "finished",
        status=status,
        error=profile.get("error") or "",
        steps=data.get("steps", 0),
        samples=data.get("samples"),
        requested=peak.get("requested_bytes"),
        reserved=data.get("reserved") or peak.get("reserved_bytes"),
        may_reserve=data.get("may_reserve"),
        context=data.get("context"),
        retries=data.get("retries", 0),
        category=category,
        module=module,
        phase=phase,
        seconds=seconds,
        directory=str(directory),
        categories={name: size for name, size in peak.get("categories", {}).items() if size},
        poisson=data.get("poisson", {}),
    )


def _largest(peak: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the category with the most bytes at the peak, its module with the most bytes, and the phase."""
    categories = peak.get("categories", {})
    if not categories:
        return "", "", ""
    category = max(categories, key=lambda name: categories[name])
    modules = peak.get("modules", {})
    module = max(modules, key=lambda name: modules[name].get(category, 0), default="")
    return category, module, peak.get("phase", "")
