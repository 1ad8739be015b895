# SPDX-License-Identifier: Apache-2.0
"""What cuDNN and cuBLAS take of torch's memory: runs operations one by one and writes what each allocates inside.

The same program runs on a real GPU and on a virtual one, so that the two files can be compared line by line:

    python -m benchmarks.virtual_gpu.workspaces h200.json
    python -m benchmarks.virtual_gpu.workspaces virtual.json --virtual-gpu h200 --cases h200.json
    python -m benchmarks.virtual_gpu.workspaces --compare h200.json virtual.json

and what the two found is added to the table of the package, which must be moved away while the second is measured;
`--held-out` says how well it serves what was not measured:

    TABLE=opacus_memprof/virtual_gpu/cudnn_workspaces.tsv
    python -m benchmarks.virtual_gpu.workspaces $TABLE --table h200.json virtual.json
    python -m benchmarks.virtual_gpu.workspaces --held-out h200.json virtual.json

Nothing of the profiler is used on a real GPU: the sizes come from the trace of torch's caching allocator, and for a
convolution they are those allocations of the call (forward, input gradient and weight gradient each by itself, and
each for the first time) that it frees again before it returns. Other operations leave their whole sequence, frees as
negative sizes. convolution_cases.py says which convolutions, the most important first, so that what fits in
`--seconds` is what matters most. Several processes share the GPU: choosing engines takes a CPU core, not the GPU.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpu import workspace_table
from benchmarks.virtual_gpu.convolution_cases import Conv, cases
from benchmarks.virtual_gpu.workspace_calls import (
    Trace,
    device_properties,
    measure_convolution,
    measure_others,
    measure_recurrent,
)

PART = 32  # convolutions that a process measures at a time

_trace: Trace | None = None  # of this process


def wait_if_broken(deadline: float) -> None:
    """A process whose GPU context is broken by an illegal access would fail all that is left: it waits for the end."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        time.sleep(max(0, deadline - time.time()))


def measure_part(keys: list[str], deadline: float) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Temporaries of each convolution by direction, and why some failed; what `deadline` cut off is in neither."""
    global _trace
    import torch

    _trace = _trace or Trace()
    found: dict[str, list[Any]] = {}
    failed: dict[str, str] = {}
    for key in keys:
        if time.time() > deadline:
            break
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        try:
            sizes = measure_convolution(Conv.parse(key), _trace)
        except RuntimeError as error:
            failed[key] = str(error).splitlines()[0][:80]
            wait_if_broken(deadline)
            continue
        if torch.cuda.memory_stats()["num_alloc_retries"] > retries:
            failed[key] = "memory was short, so that torch may have taken another engine"
        else:
            found[key] = [answers[0] if len(answers) == 1 else answers or 0 for answers in sizes]
    torch.cuda.empty_cache()
    return found, failed


def measure_rest() -> dict[str, Any]:
    """What is not a convolution."""
    import torch

    trace = Trace()
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device_properties": device_properties(),
        "others": measure_others(trace),
        "recurrent": measure_recurrent(trace),
    }


def measure(output: Path, listed: list[Conv], seconds: float, processes: int) -> None:
    """Runs as many of the cases as there is time for, and writes the file, also in between."""
    start, deadline = time.perf_counter(), time.time() + seconds
    found: dict[str, Any] = {"convolutions": {}, "failed": {}}

    def write() -> None:
        output.write_text(json.dumps(found, separators=(",", ":")).replace('],"', '],\n"') + "\n")

    keys = [conv.key() for conv in listed]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        rest = pool.submit(measure_rest)
        parts = [pool.submit(measure_part, keys[first : first + PART], deadline) for first in range(0, len(keys), PART)]
        for number, part in enumerate(as_completed(parts), 1):
            measured, failed = part.result()
            found["convolutions"] |= measured
            found["failed"] |= failed
            if number % 20 == 0:
                print(f"{time.perf_counter() - start:.0f} s: {len(found['convolutions'])} convolutions", flush=True)
                write()
        write()
        found |= rest.result()
    write()
    print(
        f"{time.perf_counter() - start:.0f} s: {len(found['convolutions'])} of {len(keys)} convolutions, "
        f"{len(found['failed'])} failed, {output.stat().st_size} bytes"
    )


def compare(real_path: Path, other_path: Path, shown: int = 20) -> None:
    """Says for how many calls the two files have the same sizes, and shows the worst differences."""
    real, other = json.loads(real_path.read_text()), json.loads(other_path.read_text())

    def total(sizes: int | list[int] | str) -> int:
        """The most that is live, taking what a convolution frees inside as live together; 0 for a failure."""
        if not isinstance(sizes, list):
            return sizes if isinstance(sizes, int) else 0
        live = most = 0
        for size in sizes:
            live += size
            most = max(most, live)
        return most

    for part in ("convolutions", "recurrent", "others"):
        pairs = []
        for key in real[part].keys() & other[part].keys():
            both = real[part][key], other[part][key]
            if part == "convolutions":
                pairs += [(f"{key} {name}", a, b) for name, a, b in zip("fdw", *both, strict=True)]
            else:
                pairs.append((key, *both))
        different = [(abs(total(b) - total(a)), key, a, b) for key, a, b in pairs if a != b]
        print(f"{part}: {len(pairs) - len(different)} of {len(pairs)} equal")
        for _, key, a, b in sorted(different, reverse=True, key=lambda row: row[0])[:shown]:
            print(f"  {key}: {a} != {b}")


def main() -> None:
    """Measures, compares or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="the file to write")
    parser.add_argument("--most", type=int, default=20000, help="at most this many convolutions")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="on the one GPU")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--virtual-gpu", help="run on a virtual GPU of this kind")
    parser.add_argument("--cases", type=Path, help="run the convolutions of this file")
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--table", type=Path, nargs=2)
    parser.add_argument("--held-out", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    if options.output is None and not options.held_out:
        parser.error("name the file to write")
    if options.table or options.held_out:
        real, virtual = (json.loads(path.read_text()) for path in options.table or options.held_out)
        found = workspace_table.collect(real["convolutions"], virtual["convolutions"])
        if options.table:
            origin = f"{real['gpu']}, torch {real['torch']}, cuDNN {real['cudnn']}"
            workspace_table.write(found, origin, options.output)
        else:
            workspace_table.held_out(found)
        return
    if options.virtual_gpu:
        from opacus_memprof import virtual_gpu

        virtual_gpu.start(options.virtual_gpu)
    if options.cases:
        listed = [Conv.parse(key) for key in json.loads(options.cases.read_text())["convolutions"]][: options.most]
    else:
        listed = cases(options.most)
    print(f"{len(listed)} convolutions to measure", flush=True)
    measure(options.output, listed, options.seconds, options.processes)


if __name__ == "__main__":
    sys.exit(main())
