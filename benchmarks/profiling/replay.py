# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the analysis of a profile: `python -m benchmarks.profiling.replay [--events 10000000]`.

Writes an event file of a made-up training run (steps of forward, backward and optimizer, a captured activation for
every fourth block; with --leaking of blocks that are never freed), then builds its profile.json in a process of its own
and prints one JSON object: seconds and resident MiB of the replay and of the whole analysis.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ALLOC, FREE, RETAG, STEP, PHASE = 1, 2, 3, 4, 5
IDLE, FORWARD, BACKWARD, OPTIMIZER_STEP = 0, 2, 3, 7
MODEL_PARAMETERS, HOOKS, BACKWARD_TEMPORARIES, OPTIMIZER_TEMPORARIES, UNDECIDED = 1, 6, 16, 17, 22
BLOCKS = 1000  # of a step's forward, likewise of its backward and of its optimizer step


def leaking_step() -> np.ndarray:
    """As `one_step`, of blocks that are never freed: the table of live blocks is as large as it gets."""
    sizes = np.random.default_rng(0).integers(1, 2**22, BLOCKS)
    rows = [(ALLOC, UNDECIDED, 512 * block, FORWARD, int(size), block % 200, 1) for block, size in enumerate(sizes)]
    return np.array([*rows, (STEP, 0, 0, IDLE, 0, 0, 0)], dtype=np.uint64)


def one_step() -> np.ndarray:
    """The events of a step: columns kind, category, address, phase, size, module, op. Its number is missing."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 2**22, BLOCKS)
    rows = []
    for phase, category, half in (
        (FORWARD, UNDECIDED, BLOCKS // 2),  # half of what forward allocates is freed in it
        (BACKWARD, BACKWARD_TEMPORARIES, BLOCKS),
        (OPTIMIZER_STEP, OPTIMIZER_TEMPORARIES, BLOCKS),
    ):
        rows.append((PHASE, 0, 0, phase, 0, 0, 0))
        for block in range(BLOCKS):
            address, size, module = (phase << 32) + 512 * block, int(sizes[block]), block % 200
            rows.append((ALLOC, category, address, phase, size, module, 1))
            if phase == FORWARD and block >= half and block % 2:
                rows.append((RETAG, HOOKS, address, phase, size, module, UNDECIDED))
            if (phase == FORWARD and block < half) or (phase != FORWARD and block >= 20):
                past = address if phase == FORWARD else address - 20 * 512
                rows.append((FREE, category, past, phase, 0, module, 1))
        if phase == BACKWARD:
            for block in range(BLOCKS // 2, BLOCKS):
                last = HOOKS if block % 2 else UNDECIDED
                rows.append((FREE, last, (FORWARD << 32) + 512 * block, phase, 0, 0, 1))
        if phase != FORWARD:
            rows += [
                (FREE, category, (phase << 32) + 512 * block, phase, 0, 0, 1) for block in range(BLOCKS - 20, BLOCKS)
            ]
    rows.append((STEP, 0, 0, IDLE, 0, 0, 0))
    return np.array(rows, dtype=np.uint64)


def write_events(path: Path, count: int, leaking: bool) -> None:
    """An event file of `count` events, in the layout of docs/format.md."""
    kind, category, address, phase, size, module, op = (leaking_step() if leaking else one_step()).T
    step = np.zeros((len(kind), 4), dtype="<u8")
    step[:, 0] = kind << 48 | category << 56
    step[:, 1] = address | phase << 48 | 1 << 56
    step[:, 2] = size
    step[:, 3] = module | op << 16
    header = np.zeros(512, dtype="<u8")
    header[0] = int.from_bytes(b"OMEMPROF", "little")
    header[1] = 1 | 32 << 32
    header[2] = header[4] = count
    header[6:11] = 0, 10**18, count * 100, 10**18 + count * 100, 1  # a tick is a nanosecond
    with open(path, "wb") as file:
        file.write(header.tobytes())
        written = number = 0
        while written < count:
            events = step[: count - written].copy()
            events[:, 0] |= (np.arange(len(events), dtype=np.uint64) + written) * 100
            events[:, 3] |= np.uint64(number << 32)
            if leaking:
                events[:, 1] += np.uint64(number * 512 * BLOCKS)
            if len(events) == len(step):
                number += 1
                events[-1, 3] = number << 32
                events[-1, 2] = number
            file.write(events.tobytes())
            written += len(events)


def resident_mib() -> float:
    """The process' highest so far. Unlike getrusage's, it does not begin with that of the process that forked it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(directory: Path) -> dict[str, float]:
    """In this process: the replay alone, then all that happens up to profile.json."""
    from opacus_memprof.analysis.profile import build_profile, write_profile
    from opacus_memprof.profiles import core

    before = resident_mib()
    start = time.perf_counter()
    result = core.replay(str(directory))
    replayed = time.perf_counter()
    if any(result["contradictions"].values()):
        raise SystemExit(f"the benchmark's own file is wrong: {result['contradictions']}")
    profile = build_profile(directory, status="finished", exit_code=0)
    write_profile(profile, directory)
    return {
        "replay_seconds": round(replayed - start, 2),
        "analysis_seconds": round(time.perf_counter() - replayed, 2),
        "resident_mib": round(resident_mib()),
        "resident_mib_before": round(before),  # torch and the interpreter
        "profile_json_mib": round((directory / "profile.json").stat().st_size / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--leaking", action="store_true", help="no block is ever freed")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_events(Path(directory, "events.bin"), arguments.events, arguments.leaking)
        command = [sys.executable, __file__, "--measure", directory]
        figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(json.dumps({"events": arguments.events, "machine": platform.processor() or platform.machine(), **figures}))


if __name__ == "__main__":
    main()
