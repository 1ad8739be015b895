# SPDX-License-Identifier: Apache-2.0
"""The process of a replay: `python -m opacus_memprof.planning.replay_process ASKED DIRECTORY RESULT`.

Allocates every block of a device in events.bin again, in the same order, with the same size and on as many streams, and
frees it at the same position.
"""

import json
import sys
from pathlib import Path
from typing import Any

from opacus_memprof import virtual_gpu
from opacus_memprof.analysis.events import ALLOC, FREE, OOM, SEED, Events, Rows
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text


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


def _replay(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
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
        result = _replay(json.loads(sys.argv[1]), Path(sys.argv[2]))
    except MemprofError as error:
        result = {"refused": str(error)}
    write_text(Path(sys.argv[3]), json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
