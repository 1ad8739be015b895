# SPDX-License-Identifier: Apache-2.0
"""What a run of any length costs: `python -m benchmarks.profiling.long_run [--events 2000000] [--max-events 200000]`.

Allocates and frees CPU tensors while their events are recorded, and prints one JSON object for each tenth of the run:
events so far, bytes of all event files, resident MiB of the process, nanoseconds of the thread's own time for an event
(the median of blocks of 10 000), and events that were lost. They are flat where the bound works. The last line says
whether the peak, which is made in the middle of the run, has its modules.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import opacus_memprof
from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.recording import live, native

LIVE = 200  # tensors at any time
A_BLOCK = 5000  # allocations, and as many frees, between two readings of the clock


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def bytes_of_events(directory: Path) -> int:
    sizes = []
    for file in directory.glob("events*.bin"):
        with contextlib.suppress(FileNotFoundError):  # a piece that was removed meanwhile
            sizes.append(file.stat().st_size)
    return sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--max-events", type=int, default=200_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    opacus_memprof.install("cpu")
    kept = [torch.empty(64 + i) for i in range(LIVE)]
    blocks = max(options.events // (2 * A_BLOCK), 10)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        native.start_events(folder, options.max_events, "{}")
        native.reset_peaks()
        spent: list[float] = []
        for block in range(blocks):
            begun = time.thread_time_ns()
            for number in range(A_BLOCK):
                kept[number % LIVE] = torch.empty(64 + number % 1000)
            spent.append((time.thread_time_ns() - begun) / (2 * A_BLOCK))
            if block == blocks // 2:
                torch.empty(2**20)
            native.end_step(True)
            if (block + 1) % max(blocks // 10, 1) == 0:
                state = native.events_status()
                row = {
                    "events": state["written"],
                    "file_bytes": bytes_of_events(directory),
                    "resident_mib": round(resident_mib(), 1),
                    "ns_per_event": round(statistics.median(spent)),
                    "lost": state["dropped"],
                }
                print(json.dumps(row), flush=True)
                spent.clear()
        peaks = live.read_peaks()
        native.stop_events()
        profile = build_profile(directory, status="finished", exit_code=0, peaks=peaks)
        peak = profile.devices["cpu"].peak
        counted = peaks["cpu"].requested_bytes
        print(json.dumps({"peak": peak.requested_bytes, "counted": counted, "source": peak.source, "step": peak.step}))


if __name__ == "__main__":
    main()
