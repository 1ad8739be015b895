# SPDX-License-Identifier: Apache-2.0
"""How long a plan takes: the largest batch of a GPT with the sizes of GPT-2, in three modes on one kind of GPU.

    python -m benchmarks.planning.run_time --output DIR

Seconds by the clock, and CPU seconds of all processes, which do not depend on what else the machine does. On two cores
that do nothing else a plan takes about half of its CPU seconds. DIR/planning_time.json and .md; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("gpt2.py")
MODES = ("hooks", "ghost", "flash_clip")


def measure(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="planning_time_") as folder:
        command = [sys.executable, "-m", "opacus_memprof", "plan", "--gpu", kind, "--search", "batch-size=1..1024"]
        command += ["--modes", ",".join(MODES), "-o", folder, str(PROGRAM)]
        load, begun, before = os.getloadavg()[0], time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=sys.stderr)
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        cells = json.loads((Path(folder) / "plan.json").read_text())["cells"]
    import torch

    return {
        "gpu": kind,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "load_before": round(load, 1),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "modes": [{key: cell[key] for key in ("mode", "largest")} | {"runs": len(cell["runs"])} for cell in cells],
    }


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"The largest batch of a GPT with the sizes of GPT-2 on a virtual {found['gpu']}: {found['seconds']} s, and "
        f"{found['cpu_seconds']} CPU seconds, on {found['cores']} cores with a load of {found['load_before']} before "
        f"(torch {found['torch']}, python {found['python']}).",
        "",
        "| mode | largest batch | virtual runs |",
        "|---|---:|---:|",
        *(f"| {row['mode']} | {row['largest']} | {row['runs']} |" for row in found["modes"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("."))
    parser.add_argument("--kind", default="h100", help="the virtual GPU (default: %(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    found = measure(args.kind)
    (args.output / "planning_time.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.output / "planning_time.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
