# SPDX-License-Identifier: Apache-2.0
"""Reads the live memory of a running process from the profile that it is writing."""

import contextlib
import os
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from opacus_memprof.analysis.events import Names
from opacus_memprof.analysis.profile import is_being_written, refuse_no_directory
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.directory import EVENTS, META
from opacus_memprof.profiles.json_object import JsonObject
from opacus_memprof.profiles.profile import Groups, ReservedPeak, Sizes, VirtualGpus, read_meta

_EVENTS_PATH = re.compile(rf"(?P<path>/.*)/{re.escape(EVENTS)}(?: \(deleted\))?")
_MIN_STEPS = 4  # for a trend


class RunningDevice(JsonObject):
    """The bytes on one device of a running profile.

    Attributes:
        peak_bytes: the peak so far, in the step `peak_step`.
        reserved_peak: the most reserved bytes, up to a second ago; None if the allocator does not count them.
        categories, modules: as in Peak, with forward_undecided for blocks from forward.
        step_ends: live bytes at the ends of the newest steps.
        bytes_per_step: the slope of the line through these (least squares); None for fewer than four.
    """

    requested_bytes: int
    peak_bytes: int
    peak_step: int
    categories: Sizes
    modules: Groups
    step_ends: list[int]
    bytes_per_step: int | None
    reserved_peak: ReservedPeak | None = None


class RunningProfile(JsonObject, kw_only=True):
    """The live memory of a profile at `unix_ns` (nanoseconds since 1970).

    Attributes:
        virtual: see meta.json.
        status: "running", "ended" or "killed".
        events, dropped: events so far, and events that were lost before they reached the disk.
        out_of_memory: number of allocations that failed.
    """

    directory: str
    virtual: VirtualGpus | UnsetType = UNSET
    pid: int
    status: str
    unix_ns: int
    step: int
    logical_step: int
    phase: str
    events: int
    dropped: int
    out_of_memory: int
    devices: dict[str, RunningDevice]


class ProfileFollower:
    """Follows the profile in `directory`. Each `read` processes the events written since the last one.

    Raises:
        MemprofError: there is no readable profile.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        refuse_no_directory(self.directory)
        if not (self.directory / EVENTS).exists():
            raise MemprofError(f"{directory} holds no profile: there is no {EVENTS} in it")
        try:
            self._follower = core.Follower(str(directory))
        except RuntimeError as error:
            raise MemprofError(f"there is no readable profile in {directory}: {error}") from error

    def read(self) -> RunningProfile:
        """Returns the live bytes of all devices now."""
        running = is_being_written(self.directory)  # before reading: if it has ended, all of it is read
        state = self._follower.advance()
        meta = read_meta(self.directory / META)
        names = Names(meta.names, state)
        return RunningProfile(
            directory=str(self.directory),
            virtual=meta.virtual,
            pid=state["pid"],
            status="ended" if state["closed"] else "running" if running else "killed",
            unix_ns=time.time_ns(),
            step=state["step"],
            logical_step=state["logical_step"],
            phase=names.phase(state["phase"]),
            events=state["events"],
            dropped=state["dropped"],
            out_of_memory=state["out_of_memory"],
            devices={
                (name := names.device(device["id"])): _device(device, names, meta.reserved_peaks.get(name))
                for device in state["devices"]
            },
        )


def _device(device: Mapping[str, Any], names: Names, reserved: ReservedPeak | None) -> RunningDevice:
    ends = device["step_ends"]
    slope = None
    if len(ends) >= _MIN_STEPS:
        slope = round(statistics.linear_regression(range(len(ends)), ends).slope)
    return RunningDevice(
        requested_bytes=device["bytes"],
        peak_bytes=device["peak_bytes"],
        peak_step=device["peak_step"],
        categories=names.categories(device["categories"]),
        modules={names.module(module): names.categories(sizes) for module, sizes in device["modules"].items()},
        step_ends=ends,
        bytes_per_step=slope,
        reserved_peak=reserved,
    )


def directory_of_process(pid: int) -> Path:
    """Returns the directory into which a running process writes its profile, from its open event file.

    Raises:
        MemprofError: the process does not exist, cannot be read, or is not profiled.
    """
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        raise MemprofError(f"process {pid} cannot be read from here: give the directory of its profile") from None
    except OSError:
        raise MemprofError(f"there is no process {pid}: give the directory of a profile") from None
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            if match := _EVENTS_PATH.fullmatch(os.readlink(file)):
                return Path(match["path"])
    raise MemprofError(f"process {pid} is not being profiled: start it with `opacus-memprof run`")
