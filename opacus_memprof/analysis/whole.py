# SPDX-License-Identifier: Apache-2.0
"""What a profile.json has at least: a file that lacks it is somebody else's."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.directory import PROFILE
from opacus_memprof.errors import MemprofError

_PROFILE = {
    "devices": dict,
    "events": dict,
    "findings": list,
    "warnings": list,
    "status": str,
    "pid": int,
    "started_unix_ns": int,
    "ended_unix_ns": int,
}
_DEVICE = {
    "peak": dict,
    "phases": dict,
    "steps": list,
    "steps_left_out": int,
    "snapshots": list,
    "out_of_memory": list,
    "timeline": dict,
    "end_bytes": int,
}
_PHASE = {"peak_bytes": int, "categories": dict}
_PEAK = {"requested_bytes": int, "step": int, "phase": str, "categories": dict, "modules": dict, "components": dict}


def load_whole_profile(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """load_profile for those that need all of it: also raises MemprofError with the first key that profile.json lacks
    and every release has written."""
    profile = load_profile(directory)
    path = Path(directory) / PROFILE
    _check(profile, path, "", _PROFILE)
    _check(profile["events"], path, "events.", {"recorded": int})
    for name, device in profile["devices"].items():
        _check(device, path, f"devices.{name}.", _DEVICE)
        _check(device["peak"], path, f"devices.{name}.peak.", _PEAK)
        for phase, moment in device["phases"].items():
            _check(moment, path, f"devices.{name}.phases.{phase}.", _PHASE)
    return profile


def _check(part: Any, path: Path, where: str, keys: Mapping[str, type]) -> None:
    for key, kind in keys.items():
        if not isinstance(part, dict) or not isinstance(part.get(key), kind):
            raise MemprofError(f"{path} is not the profiler's, for it lacks {where}{key}: profile again")
