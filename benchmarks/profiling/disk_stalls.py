# SPDX-License-Identifier: Apache-2.0
"""Whether an allocation ever waits for a disk: `python -m benchmarks.profiling.disk_stalls [--seconds 10]`.

Times each allocation of a CPU tensor, without events and with them: on an idle disk, while another thread calls
fdatasync on all event files 20 times a second (the kernel writes their pages back), and where the file may not grow
(a full disk: RLIMIT_FSIZE). Without events that thread has a file of its own, to which it writes. Prints one JSON
object for each: allocations, percentiles in microseconds, the number above 100 µs, and the minor page faults of the
allocating thread. The machine's own pauses, and the other thread's, are in the rows without events: these are what to
compare with.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import opacus_memprof
from opacus_memprof.recording import native

LIVE = 200  # tensors at any time
MAX_EVENTS = 2**21


def time_allocations(seconds: float) -> dict[str, float]:
    kept = [torch.empty(64) for _ in range(LIVE)]
    times = np.zeros(4_000_000, np.int64)
    clock = time.perf_counter_ns
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    times[:] = 1  # its pages are there
    count, end = 0, clock() + int(seconds * 1e9)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    while count < len(times):
        begun = clock()
        kept[count % LIVE] = torch.empty(64)
        ended = clock()
        times[count] = ended - begun
        count += 1
        if ended > end:
            break
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
    spent = times[:count] / 1000
    percentiles = {f"p{share}": round(float(np.percentile(spent, share)), 2) for share in (50, 99, 99.9, 99.99)}
    above = int((spent > 100).sum())
    return {"allocations": count, **percentiles, "max": round(float(spent.max())), "above_100": above, "faults": faults}


@contextlib.contextmanager
def written_back(directory: Path) -> Iterator[None]:
    """Meanwhile the kernel writes the event files' pages back, 20 times a second."""
    stop = threading.Event()

    other = directory / "events_other.bin"

    def sync() -> None:
        while not stop.wait(0.05):
            other.write_bytes(bytes(1 << 20))
            for file in directory.glob("events*.bin"):
                with contextlib.suppress(OSError):
                    descriptor = os.open(file, os.O_RDONLY)
                    os.fdatasync(descriptor)
                    os.close(descriptor)

    thread = threading.Thread(target=sync)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    """Meanwhile no file grows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def idle(directory: Path) -> Iterator[None]:
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    opacus_memprof.install("cpu")
    time_allocations(0.5)
    for disk, has_events in itertools.product((idle, written_back, full), (False, True)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            if has_events:
                native.start_events(folder, MAX_EVENTS, "{}")
            with disk(Path(folder)):
                row: dict[str, float] = time_allocations(seconds)
                if has_events:
                    row["lost"] = native.events_status()["dropped"]
            if has_events:
                native.stop_events()
        print(json.dumps({"disk": disk.__name__, "events": has_events, **row}), flush=True)


if __name__ == "__main__":
    main()
