# SPDX-License-Identifier: Apache-2.0
"""Describes a run: its metadata, how the program ended, and the session's profile, complete or so far."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from opacus_memprof import virtual_gpu
from opacus_memprof.analysis.profile import build_profile, build_profile_from_counters, find_again, write_profile
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.live_memory import LivePeak
from opacus_memprof.profiles.profile import Finding, Profile, Sizes
from opacus_memprof.recording import faults, live, native, observations
from opacus_memprof.recording.faults import contain
from opacus_memprof.session.out_of_memory import is_out_of_memory
from opacus_memprof.versions import VERSION, installed_version


class Result:
    """The profile of a session and its metadata.

    Attributes:
        profile: the content of profile.json, once it is written.
        live_at_end: the bytes by device and category that were live at the end of the recording; None before.
        warnings: sentences about the limits of the profile.
        pid: the id of the recording process.
    """

    def __init__(self, directory: Path, warnings: list[str]) -> None:
        self.profile: Profile | None = None
        self.live_at_end: dict[str, Sizes] | None = None
        self.warnings = warnings
        self.pid = os.getpid()
        self._directory = directory
        self._started_unix_ns = time.time_ns()
        self._peaks: dict[str, LivePeak] = {}
        self._observations: list[dict[str, Any]] = []
        self._so_far: tuple[tuple[int, int], Profile] | None = None  # by events written and dropped so far

    def read_figures(self) -> None:
        """Keeps the figures that only the recording process can read, before anything is undone."""
        with contain("reading the live bytes"):
            self.live_at_end = live.read_breakdown()
        with contain("reading the peaks"):
            self._peaks = live.read_peaks()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contain("reading what the GPU is"):
                observations.record_gpu(torch.cuda.current_device())
        with contain("reading what the hooks have recorded"):
            self._observations = observations.recorded()
        with contain("reading how many events were written"):
            events = native.events_status()
            if events["error"] and events["dropped"]:
                self.warnings.append(f"the event files could not grow ({events['error']}): events are missing")

    def write(self, status: str, exit_code: int, error: str | None) -> Profile:
        """Builds the profile from the events and writes profile.json.

        Raises:
            MemprofError: the events cannot be read, or profile.json cannot be written.
        """
        profile = build_profile(
            self._directory,
            status=status,
            exit_code=exit_code,
            error=error,
            peaks=self._peaks,
            warnings=self._all_warnings(),
            observations=self._observations,
            virtual=virtual_gpu.describe_run(),
            shapes=observations.layer_shapes(),
        )
        write_profile(profile, self._directory)
        self.profile = profile
        return profile

    def findings(self) -> list[Finding]:
        """Returns the findings of the written profile, with sentences in the current unit."""
        if self.profile is None or not self.profile.findings:
            return []
        program = observations.layer_shapes().program
        return find_again(self._directory, self.profile, self._observations, program)

    def write_from_counters(self, status: str, exit_code: int, error: str | None) -> Profile:
        """Builds the profile from the live counters only and writes profile.json, after `write` has failed.

        Raises:
            MemprofError: profile.json cannot be written.
        """
        self.profile = self._build_from_counters(status, exit_code, error)
        write_profile(self.profile, self._directory)
        return self.profile

    def so_far(self) -> Profile:
        """Returns the profile; before the end of the session, the profile so far."""
        if self.profile is not None:
            return self.profile
        with contain("building the profile so far"):
            events = native.events_status()
            count = events["written"], events["dropped"]
            if self._so_far is None or self._so_far[0] != count:
                native.write_meta()
                profile = build_profile(
                    self._directory,
                    status="running",
                    exit_code=None,
                    peaks=live.read_peaks(),
                    warnings=virtual_gpu.describe_limits(),
                    virtual=virtual_gpu.describe_run(),
                    dropped=events["dropped"],
                )
                self._so_far = count, profile
            return self._so_far[1]
        with contain("reading the peaks"):
            self._peaks = live.read_peaks()
        return self._build_from_counters("running", None, None)

    def _build_from_counters(self, status: str, exit_code: int | None, error: str | None) -> Profile:
        return build_profile_from_counters(
            self._directory,
            status=status,
            exit_code=exit_code,
            error=error,
            started_unix_ns=self._started_unix_ns,
            peaks=self._peaks,
            warnings=self._all_warnings(),
        )

    def _all_warnings(self) -> list[str]:
        limits: list[str] = []
        with contain("describing what a virtual GPU cannot know"):
            limits += virtual_gpu.describe_limits()
        return [*self.warnings, *limits, *faults.recorded()]


def outcome(error: BaseException | None) -> tuple[str, int]:
    """Returns a program's status and exit code. `error` is the exception that ended it, or None."""
    code = 1
    if error is None:
        code = 0
    elif isinstance(error, KeyboardInterrupt):
        return "killed", 130
    elif isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
    if code == 0:
        return "finished", 0
    return "out_of_memory" if is_out_of_memory(error) else "failed", code


def one_line(error: BaseException | None) -> str | None:
    """Returns the exception's type and the first line of its message, for people."""
    if error is None or (isinstance(error, SystemExit) and not isinstance(error.code, str)):
        return None
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def describe_run(device: str, launch: Launch | None) -> dict[str, Any]:
    """Returns the entries of meta.json that the recorder does not write itself. Never initialises CUDA."""
    return {
        "versions": {
            "opacus_memprof": VERSION,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "opacus": installed_version("opacus"),
            "python": platform.python_version(),
        },
        "device": device,
        "command": sys.argv,
        "launch": None if launch is None else dict(launch),
    }
