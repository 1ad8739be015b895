# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a virtual GPU in a process of its own, and says what came of it. Needs no torch in this one."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.forked_runs import ForkedRuns
from opacus_memprof.profiles.directory import OOM_REPORTS, PROFILE
from opacus_memprof.profiles.files import read_object, writing

LOG = "log.txt"
FACTS = "facts.json"  # what the process says of itself at its end
PROFILE_OF_RUN = "profile"
_SUMMARY = "opacus-memprof  "  # begins what the profiler prints after the program's own words


@dataclass(frozen=True)
class Program:
    """What is run: a script, or with `module` a module, and its arguments. `title`: what people call it instead."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.target

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments that people have given."""
        return () if self.title else self.arguments


@dataclass(frozen=True)
class Configuration:
    """A program on a kind of virtual GPU.

    Attributes:
        memory: bytes of the GPU; None for the kind's.
        ranks: processes of the job, a GPU each, of which the first is run and the others are not.
        changes: actions of a suggestion (docs/oom.md) that are applied without changing the program.
    """

    program: Program
    gpu: str
    memory: int | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    ranks: int = 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [dict(change) for change in self.changes]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Configuration":
        program = content["program"]
        return cls(
            Program(program["target"], tuple(program["arguments"]), program["module"]),
            content["gpu"],
            content["memory"],
            tuple(content["changes"]),
            content["ranks"],
        )


@dataclass(frozen=True)
class VirtualRun:
    """The outcome of a run. Sizes are in bytes; None where the run did not get so far.

    Attributes:
        fits: it came to its end, and memory did not run out on the way.
        status: "finished", "out_of_memory", "failed" or "killed". `error`: the program's last words, in a line.
        steps: calls of an optimizer's step that have ended.
        samples: of the largest physical batch that was seen.
        requested, reserved: the peaks.
        may_reserve: the GPU's memory less what CUDA's context and libraries take.
        context: what these take.
        retries: how often torch had to give cached memory back to the GPU before an allocation went well.
        category, module, phase: of the most bytes at the peak; of a run that ran out of memory, of what was asked for.
        categories: requested bytes at the peak.
        poisson: of a loader that draws batch sizes its "samples", "rate" and "steps"; {} of another.
        seconds: of the whole process.
        directory: of its profile and its log.
        packages: that it has imported, in an environment that it had not changed: others can be forked with these.
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
    packages: tuple[str, ...] = ()

    @property
    def profile(self) -> Path:
        return Path(self.directory) / PROFILE_OF_RUN

    def oom_report(self) -> dict[str, Any] | None:
        """oom_report.json of a run that ran out of memory; else None."""
        file = self.profile / OOM_REPORTS[1]
        return read_object(file) if file.exists() else None

    def last_words(self) -> str:
        """The last line that the program has printed; "" where it has printed none."""
        text = (Path(self.directory) / LOG).read_text(encoding="utf-8", errors="replace")
        own = text.partition(_SUMMARY)[0] if _SUMMARY in text else text
        return next((line.strip() for line in reversed(own.splitlines()) if line.strip()), "")


def run_virtually(
    configuration: Configuration, directory: Path, threads: int | None = None, forked: ForkedRuns | None = None
) -> VirtualRun:
    """Runs the program to its end. `directory` is the run's own and is replaced: profile/, log.txt, facts.json.

    Args:
        threads: of each library that computes on the CPU; None leaves it to them.
        forked: runs it, with its environment, in the place of a new process.

    Raises:
        MemprofError: a virtual GPU cannot work here, the program cannot be found, or the directory not be written.
    """
    with writing(directory):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / LOG).touch()
    asked = json.dumps(configuration.to_json())
    start = time.monotonic()
    exit_code = None if forked is None else forked.run(asked, directory, directory / LOG)
    if exit_code is None:
        exit_code = _run_in_new_process(asked, directory, run_environment(configuration, threads))
    return _read(directory, exit_code, time.monotonic() - start)


def run_environment(configuration: Configuration, threads: int | None) -> dict[str, str]:
    """The environment variables of a run."""
    environment = dict(os.environ)
    settings = [change["value"] for change in configuration.changes if change["kind"] == "allocator_setting"]
    if settings:
        given = environment.get("PYTORCH_CUDA_ALLOC_CONF")
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ",".join([*([given] if given else []), *settings])
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _run_in_new_process(asked: str, directory: Path, environment: dict[str, str]) -> int:
    # Not an import: the command line stands above this.
    command = [sys.executable, "-m", "opacus_memprof.planning.run_process", asked, str(directory.absolute())]
    with open(directory / LOG, "w", encoding="utf-8") as log:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return child.wait()
        except BaseException:  # Ctrl-C, most of all
            child.kill()
            child.wait()
            raise


def _read(directory: Path, exit_code: int, seconds: float) -> VirtualRun:
    facts = read_object(directory / FACTS) if (directory / FACTS).exists() else {}
    if refused := facts.get("refused"):
        raise MemprofError(str(refused))
    profile: dict[str, Any] = {}
    with contextlib.suppress(MemprofError):  # there is none where the program has not imported torch, or was killed
        profile = read_object(directory / PROFILE_OF_RUN / PROFILE)
    devices = profile.get("devices", {})
    name = next((name for name in devices if name.startswith("cuda")), None)
    device = devices.get(name, {})
    ran_out = (directory / PROFILE_OF_RUN / OOM_REPORTS[1]).exists()
    status = profile.get("status", "killed" if exit_code < 0 else "failed" if exit_code else "finished")
    if ran_out and status in ("finished", "failed"):
        status = "out_of_memory"  # the program has handled it, or died of something else that it led to
    peak = device.get("peak", {})
    category, module, phase = _largest(peak)
    if ran_out:
        request = read_object(directory / PROFILE_OF_RUN / OOM_REPORTS[1])["request"]
        category, module, phase = request["category"], request["module"], request["phase"]
    return VirtualRun(
        fits=status == "finished",
        status=status,
        error=profile.get("error") or "",
        steps=facts.get("steps", 0),
        samples=facts.get("samples"),
        requested=peak.get("requested_bytes"),
        reserved=facts.get("reserved") or peak.get("reserved_bytes"),
        may_reserve=facts.get("may_reserve"),
        context=facts.get("context"),
        retries=facts.get("retries", 0),
        category=category,
        module=module,
        phase=phase,
        seconds=seconds,
        directory=str(directory),
        categories={name: size for name, size in peak.get("categories", {}).items() if size},
        poisson=facts.get("poisson", {}),
        packages=tuple(facts.get("packages", ())),
    )


def _largest(peak: Mapping[str, Any]) -> tuple[str, str, str]:
    """The category with the most bytes at the peak, the module with the most bytes of it, and the phase."""
    categories = peak.get("categories", {})
    if not categories:
        return "", "", ""
    category = max(categories, key=lambda name: categories[name])
    modules = peak.get("modules", {})
    module = max(modules, key=lambda name: modules[name].get(category, 0), default="")
    return category, module, peak.get("phase", "")
