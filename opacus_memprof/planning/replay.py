# SPDX-License-Identifier: Apache-2.0
"""What a recorded run would have reserved with other settings of torch's allocator, or on another GPU.

Its allocations and frees are played through torch's own allocator on a virtual GPU, in a process of its own and without
the program.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UnsetType

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.pool import usable_workers
from opacus_memprof.planning.verdict import LARGEST_MEMORY
from opacus_memprof.profiles.directory import rank_directories
from opacus_memprof.profiles.files import read_object
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.virtual_gpu import choose_gpu
from opacus_memprof.virtual_gpu.devices import GPUS, find_gpu

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older name is the one that every torch reads
_RESULT = "result.json"


@dataclass(frozen=True)
class Recording:
    """A recorded run, and the GPU that it is played on. Bytes.

    Attributes:
        device: whose blocks are played: of several CUDA devices the one with the highest peak.
        memory: of the GPU, the kind's unless another was asked for.
        outside: the most that was used on the device beside torch's memory; None where nobody has counted.
    """

    directory: Path
    device: str
    gpu: str
    memory: int
    outside: int | None
    status: str


@dataclass(frozen=True)
class Replay:
    """The outcome of playing a run. Sizes are in bytes.

    Attributes:
        settings: of torch's allocator; "" for its defaults.
        reserved, requested: the peaks.
        may_reserve: the GPU's memory less what was used beside torch's.
        needed: to reserve, for all of the run; None where no GPU is large enough.
        retries: how often cached memory had to be given back to the GPU before an allocation went well.
        failed: where memory ran out: "bytes", "category", "module", "phase" and "step" of what was asked for.
    """

    settings: str
    fits: bool
    reserved: int
    requested: int
    may_reserve: int
    needed: int | None
    retries: int
    failed: dict[str, Any] | None


def read_recording(directory: Path, gpu: str | None, memory: int | None) -> Recording:
    """The recording in a profile's directory, for a kind of GPU; None is the virtual GPU that it was recorded on.

    Raises:
        MemprofError: there is no profile, it has no CUDA device, not all of its events, or no kind of GPU.
    """
    if rank_directories(directory):
        raise MemprofError(f"{directory} holds several ranks: name one of them, as {directory / 'rank_0'}")
    profile = load_profile(directory)
    if gpu is not None:
        find_gpu(gpu)
    elif isinstance(profile.virtual, UnsetType):
        raise MemprofError(f"{directory} was recorded on a real GPU, whose kind it does not have: add --gpu KIND")
    else:
        gpu, memory = profile.virtual.gpu, memory or profile.virtual.memory_bytes
    device = _device(directory, profile)
    if profile.events.dropped:
        raise MemprofError(
            f"{directory} lacks {profile.events.dropped} events, which found no room: record it again with more "
            "--max-events"
        )
    counted = [snapshot.outside_pytorch for snapshot in profile.devices[device].snapshots]
    outside = max((size for size in counted if isinstance(size, int)), default=None)
    return Recording(directory, device, gpu, memory or GPUS[gpu].total_memory, outside, profile.status)


def replay(recording: Recording, settings: Sequence[str]) -> list[Replay]:
    """Plays the run once with each of the settings, as PYTORCH_CUDA_ALLOC_CONF has them, side by side.

    Raises:
        MemprofError: torch does not know a setting, or a virtual GPU cannot work here or have so little memory.
    """
    with ThreadPoolExecutor(usable_workers()) as pool:
        return list(pool.map(lambda setting: _replay(recording, setting), settings))


def _replay(recording: Recording, settings: str) -> Replay:
    context = GPUS[recording.gpu].context_memory  # is taken on the virtual GPU too; kernels and libraries are not
    beside = max(0, (recording.outside or 0) - context)
    try:
        choose_gpu(recording.gpu, recording.memory - beside, 1)
    except MemprofError:
        raise MemprofError(
            f"{format_bytes(recording.memory)} cannot be played: {format_bytes(context + beside)} are taken beside "
            "torch's memory, and what is left must be at least 256 MiB and at most 1 TiB"
        ) from None
    played = _play(recording, settings, recording.memory - beside)
    needed = played["reserved"]
    if played["failed"] is not None:
        whole = _play(recording, settings, LARGEST_MEMORY)
        needed = None if whole["failed"] is not None else whole["reserved"]
    return Replay(settings, played["failed"] is None, needed=needed, **played)


def _play(recording: Recording, settings: str, memory: int) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    if settings:
        environment[_SETTINGS[1]] = settings
    with tempfile.TemporaryDirectory(prefix="memprof_replay_") as folder:
        asked = {"gpu": recording.gpu, "memory": memory, "device": recording.device}
        command = [sys.executable, "-m", "opacus_memprof.planning.replay_process", json.dumps(asked)]
        command += [str(recording.directory.absolute()), str(Path(folder) / _RESULT)]
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if not (Path(folder) / _RESULT).exists():
            words = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise MemprofError(f"the replay of {recording.directory} has failed ({words})")
        result = read_object(Path(folder) / _RESULT)
    if "refused" in result:
        raise MemprofError(result["refused"])
    return result


def _device(directory: Path, profile: Profile) -> str:
    """The CUDA device with the highest peak."""
    devices = {name: device for name, device in profile.devices.items() if name.startswith("cuda")}
    if not devices:
        raise MemprofError(f"{directory} has no memory of a GPU: record a training on cuda")
    return max(devices, key=lambda name: devices[name].peak.requested_bytes)
