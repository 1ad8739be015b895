# SPDX-License-Identifier: Apache-2.0
"""Cost of merging the profiles of a job's ranks: `python -m benchmarks.profiling.merge [--ranks 1024] [--killed 8]`.

Writes the events of a made-up training run, has them summed up as a rank does at its end, and lays the summary out as
the directories of many ranks, each with a peak of its own; some have their events alone, as killed ranks leave them.
Then merges them in a process of its own and prints one JSON object.
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.profiling.replay import resident_mib, write_events

MODULES = 200  # that the events are of
GPUS = 8  # of a machine


def lay_out(path: Path, ranks: int, killed: int, events: int) -> dict[str, float]:
    """Writes the ranks' directories; returns what a rank's own summary takes."""
    from opacus_memprof.analysis.profile import build_profile, write_profile
    from opacus_memprof.profiles.profile import read_meta
    from opacus_memprof.recording import native

    names = native.names() | {
        "modules": ["", *(f"layers.{number // 5}.linear{number % 5}" for number in range(MODULES - 1))],
        "ops": ["", "AddmmBackward0"],
        "threads": ["main"],
        "streams": [""],
        "devices": ["cpu", "cuda:0"],
    }
    versions = {"torch": "2.15.0", "opacus": "1.6.0"}

    def make(rank: int) -> Path:
        launch = {"rank": rank, "world_size": ranks, "local_rank": rank % GPUS, "host": f"node{rank // GPUS}"}
        launch |= {"job": "merge", "launcher": 1, "restart": "0"}
        folder = path / f"rank_{rank}"
        folder.mkdir()
        meta = {"format": 1, "versions": versions, "command": ["train.py"], "launch": launch, "names": names}
        (folder / "meta.json").write_text(json.dumps(meta))
        return folder

    start = time.perf_counter()
    first = make(0)
    write_events(first / "events.bin", events, leaking=False)
    written = time.perf_counter()
    summary = build_profile(first, status="finished", exit_code=0)
    write_profile(summary, first)
    figures = {
        "write_events_seconds": round(written - start, 2),
        "own_summary_seconds": round(time.perf_counter() - written, 2),
        "profile_json_mib": round((first / "profile.json").stat().st_size / 2**20, 2),
    }
    (device,) = summary.devices.values()
    peak = device.peak
    least, randomly = dict(peak.categories), random.Random(0)
    for rank in range(1, ranks):
        folder = make(rank)
        if rank <= killed:
            (folder / "events.bin").hardlink_to(first / "events.bin")
            continue
        more = randomly.randrange(1 << 24)
        peak.categories["activations"] = least["activations"] + more
        peak.requested_bytes = sum(peak.categories.values())
        summary.launch = read_meta(folder / "meta.json").launch
        write_profile(summary, folder)
    return figures


def measure(path: Path) -> dict[str, Any]:
    """In this process: what `opacus-memprof report` does before it prints."""
    from opacus_memprof.analysis.job import load_ranks

    before = resident_mib()
    start = time.perf_counter()
    merged = load_ranks(path)
    seconds = time.perf_counter() - start
    total = sum(row.peak.requested_bytes for row in merged.ranks if row.peak)
    if merged.missing or merged.total.peaks_bytes != total:
        raise SystemExit("the ranks were not merged")
    return {
        "merge_seconds": round(seconds, 2),
        "resident_mib": round(resident_mib()),
        "resident_mib_before": round(before),  # torch and the interpreter
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--killed", type=int, default=0)
    parser.add_argument("--events", type=int, default=1_000_000, help="of each rank")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    given = {key: getattr(arguments, key) for key in ("ranks", "killed", "events")}
    with tempfile.TemporaryDirectory() as directory:
        figures = lay_out(Path(directory), **given)
        command = [sys.executable, "-m", "benchmarks.profiling.merge", "--measure", directory]
        figures |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(json.dumps({**given, "machine": platform.processor() or platform.machine(), **figures}))


if __name__ == "__main__":
    main()
