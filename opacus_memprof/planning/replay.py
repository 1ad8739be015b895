# SPDX-License-Identifier: Apache-2.0
"""Computes how much a recorded run would have reserved with other allocator settings, or on another GPU.

Its allocations and frees are repeated with torch's allocator on a virtual GPU, in a new process, without the program:
`python -m opacus_memprof.planning.replay ASKED DIRECTORY RESULT`. It allocates every block of a device in events.bin
again, in the same order, with the same size and on as many streams, and frees it at the same position.
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

from opacus_memprof import virtual_gpu
from opacus_memprof.analysis.events import ALLOC, FREE, OOM, SEED, Events, Rows
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.pool import usable_workers
from opacus_memprof.planning.verdict import LARGEST_MEMORY
from opacus_memprof.profiles.directory import rank_directories
from opacus_memprof.profiles.files import read_object, write_text
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.virtual_gpu import choose_gpu
from opacus_memprof.virtual_gpu.devices import GPUS, find_gpu

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # every version of torch reads the older name
_RESULT = "result.json"


@dataclass(frozen=True)
class Recording:
    """A recorded run, and the GPU for its replay. Sizes are in bytes.

    Attributes:
        device: the CUDA device with the highest peak, whose blocks are replayed.
        memory: memory of the GPU.
        outside: the highest use of the device's memory outside torch; None if not measured.
    """

    directory: Path
    device: str
    gpu: str
    memory: int
    outside: int | None
    status: str


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay. Sizes are in bytes.

    Attributes:
        settings: settings of torch's allocator; "" for its defaults.
        reserved, requested: the peaks.
        may_reserve: the GPU's memory without that used outside torch.
        needed: bytes to reserve for the whole run; None if no GPU is large enough.
        retries: how often torch had to return cached memory to the GPU before an allocation succeeded.
        failed: "bytes", "category", "module", "phase" and "step" of the allocation that failed; None if none did.
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
    """Reads the recording in a profile's directory.

    Args:
        directory: the directory of the profile.
        gpu: the kind of GPU for the replay; None for the virtual GPU of the recording.
        memory: memory of the GPU in bytes; None for that of the kind.

    Raises:
        MemprofError: the profile is missing, has no CUDA device, lacks events, or does not say its kind of GPU.
    """
    if rank_directories(directory):
        raise MemprofError(f"{directory} holds several ranks: name one of them, as {directory / 'rank_0'}")
    profile = load_profile(directory)
    if gpu is not None:
        find_gpu(gpu)
    elif isinstance(profile.virtual, UnsetType):
        raise MemprofError(f"{directory} does not say on which kind of GPU it was recorded: add --gpu KIND")
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
    """Replays a run with each of several allocator settings (PYTORCH_CUDA_ALLOC_CONF), several at once.

    Raises:
        MemprofError: torch does not know a setting, a virtual GPU cannot work here, or it cannot have so little memory.
    """
    with ThreadPoolExecutor(usable_workers()) as pool:
        return list(pool.map(lambda setting: _replay(recording, setting), settings))


def _replay(recording: Recording, settings: str) -> Replay:
    context = GPUS[recording.gpu].context_memory  # used on the virtual GPU too; kernels and libraries are not
    beside = max(0, (recording.outside or 0) - context)
    try:
        choose_gpu(recording.gpu, recording.memory - beside, 1)
    except MemprofError:
        raise MemprofError(
            f"{format_bytes(recording.memory)} cannot be simulated: {format_bytes(context + beside)} are used outside "
            "torch's memory, and the rest must be at least 256 MiB and at most 1 TiB"
        ) from None
    outcome = _run_replay(recording, settings, recording.memory - beside)
    needed = outcome["reserved"]
    if outcome["failed"] is not None:
        whole = _run_replay(recording, settings, LARGEST_MEMORY)
        needed = None if whole["failed"] is not None else whole["reserved"]
    return Replay(settings, outcome["failed"] is None, needed=needed, **outcome)


def _run_replay(recording: Recording, settings: str, memory: int) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    if settings:
        environment[_SETTINGS[1]] = settings
    with tempfile.TemporaryDirectory(prefix="memprof_replay_") as folder:
        asked = {"gpu": recording.gpu, "memory": memory, "device": recording.device}
        command = [sys.executable, "-m", "opacus_memprof.planning.replay", json.dumps(asked)]
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
    """Returns the CUDA device with the highest peak."""
    devices = {name: device for name, device in profile.devices.items() if name.startswith("cuda")}
    if not devices:
        raise MemprofError(f"{directory} has no memory of a GPU: record a training on cuda")
    return max(devices, key=lambda name: devices[name].peak.requested_bytes)


class _OutOfMemoryError(Exception):
    """Memory ran out at `request`."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.request = request


class AllocatorReplay:
    """Replays the blocks of one device.

    Attributes:
        requested: the highest live bytes so far.
    """

    def __init__(self, events: Events, device: str) -> None:
        import torch

        self._events = events
        self._device = 1 + int(device.partition(":")[2])  # of an event
        self._torch = torch
        self._raw_alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self._raw_delete = torch._C._cuda_cudaCachingAllocator_raw_delete
        self._streams: dict[int, Any] = {}
        self._held: dict[int, tuple[int, int]] = {}  # by block: its address here, and its bytes
        self._live = self.requested = 0

    def run(self) -> dict[str, Any] | None:
        """Replays all events. Returns the request at which memory ran out, or None."""
        try:
            self._events.for_each_chunk(self._take)
        except _OutOfMemoryError as end:
            return end.request
        return None

    def _take(self, rows: Rows) -> None:
        rows = rows[(rows["device"] == self._device)]
        columns = (rows[name].tolist() for name in ("kind", "block", "bytes", "stream"))
        for index, (kind, block, size, stream) in enumerate(zip(*columns, strict=True)):
            if kind in (ALLOC, SEED):
                self._held[block] = self._allocate(size, stream, rows[index]), size
                self._live += size
                self.requested = max(self.requested, self._live)
            elif kind == FREE:
                address, size = self._held.pop(block)
                self._live -= size
                if address:
                    self._raw_delete(address)
            elif kind == OOM:  # it may succeed here
                address = self._allocate(size, stream, rows[index])
                self.requested = max(self.requested, self._live + size)
                if address:
                    self._raw_delete(address)

    def _allocate(self, size: int, stream: int, row: Any) -> int:
        try:
            return int(self._raw_alloc(size, self._stream(stream))) if size else 0
        except self._torch.OutOfMemoryError:
            names = self._events.names
            raise _OutOfMemoryError(
                {
                    "bytes": size,
                    "category": names.reported_category(int(row["category"])),
                    "module": names.module(int(row["module"])),
                    "phase": names.phase(int(row["phase"])),
                    "step": int(row["step"]),
                }
            ) from None

    def _stream(self, id: int) -> int:
        """Returns a stream for each recorded one; the first is the default stream."""
        if id not in self._streams:
            cuda = self._torch.cuda
            self._streams[id] = cuda.Stream() if self._streams else cuda.default_stream()
        return int(self._streams[id].cuda_stream)


def _answer(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    virtual_gpu.start(asked["gpu"], memory=asked["memory"])
    try:
        import torch

        torch.cuda.init()  # type: ignore[no-untyped-call]
        replay = AllocatorReplay(Events(directory), asked["device"])
        failed = replay.run()
    except (RuntimeError, ValueError) as error:
        raise MemprofError(f"torch's allocator refuses these settings: {str(error).splitlines()[0]}") from None
    free, _ = torch.cuda.mem_get_info()
    return {
        "failed": failed,
        "reserved": torch.cuda.max_memory_reserved(),
        "requested": replay.requested,
        "may_reserve": torch.cuda.memory_reserved() + free,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def main() -> None:
    """Replays the device that sys.argv names, and writes the result into the file that it names."""
    try:
        result = _answer(json.loads(sys.argv[1]), Path(sys.argv[2]))
    except MemprofError as error:
        result = {"refused": str(error)}
    write_text(Path(sys.argv[3]), json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
