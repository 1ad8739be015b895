# SPDX-License-Identifier: Apache-2.0
"""Whether the virtual GPU runs out of memory where the real one does: trainings with 0.97 to 1.03 of what they need.

    python -m benchmarks.virtual_gpu.out_of_memory --output DIR                   # on a machine with the GPU
    python -m benchmarks.virtual_gpu.out_of_memory --output DIR --side virtual    # the half that needs none

What a training needs is found on the virtual GPU, by halving, to 0.4 %: the smallest memory in which it runs to its
end there, between the peaks of what is allocated and of what is reserved without a limit. Then it is run with shares of
that under torch.cuda.set_per_process_memory_fraction, on both. Runs are kept in DIR/oom_runs.jsonl, as peaks.py
keeps its own; DIR/virtual_gpu_oom.json and .md are made of them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpu.cases import BY_NAME, Case
from benchmarks.virtual_gpu.peaks import MIB, SIDES, Runs, gpus, run
from opacus_memprof.virtual_gpu.devices import GPUS

TRAININGS = ("gpt vanilla", "gpt hooks", "Llama hooks", "60 000 classes, hooks", "ResNet-18 hooks")
PRECISION = 0.004
SHARES = (0.97, 0.99, 1.01, 1.03)


def label(case: Case, share: float) -> str:
    return f"{case.name} at {share}"


def smallest_memory(case: Case, args: argparse.Namespace, runs: Runs) -> int:
    """Bytes in which the training runs to its end on the virtual GPU; 0 if it does not run at all."""
    if (case.name, "virtual") not in runs.found:
        run(case, "virtual", args, runs)
    unlimited = runs.found[case.name, "virtual"]
    if not unlimited["ok"]:
        return 0
    low, high = unlimited["allocated"], unlimited["reserved"]
    while high - low > PRECISION * high:
        middle = (low + high) // 2
        name = f"{case.name} in {middle} bytes"
        if (name, "virtual") not in runs.found:
            run(case, "virtual", args, runs, name, middle / args.memory)
        if runs.found[name, "virtual"]["ok"]:
            high = middle
        else:
            low = middle
    return int(high)


def outcome(found: dict[str, Any]) -> str:
    if found["ok"]:
        return "fits"
    return "out of memory" if found.get("out_of_memory") else found["error"]


def table(runs: Runs, needs: dict[str, int]) -> dict[str, Any]:
    rows = []
    for name in TRAININGS:
        for share in SHARES:
            both = [runs.found.get((label(BY_NAME[name], share), side)) for side in SIDES]
            if None not in both:
                ended = {side: outcome(result) for side, result in zip(SIDES, both, strict=True) if result}
                rows.append({"case": name, "share": share, "need": needs[name], **ended})
    agreed = sum(row["real"] == row["virtual"] for row in rows)
    return {"runs": len(rows), "agreed": agreed, "rows": rows}


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"Real and virtual agree on whether it fits in {found['agreed']} of {found['runs']} runs.",
        "",
        "| training | needs, MiB | is given | real | virtual |",
        "|---|---:|---:|---|---|",
    ]
    for row in found["rows"]:
        share = f"{row['share']:.2f}"
        lines.append(f"| {row['case']} | {row['need'] / MIB:.0f} | {share} | {row['real']} | {row['virtual']} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--kind", default="h200", help="the virtual GPU (default: %(default)s)")
    parser.add_argument("--side", choices=SIDES, help="the limited runs of this half alone")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 4), help="virtual runs at once")
    parser.add_argument("--real-jobs", type=int, default=3, help="runs at once on the real GPU (default: %(default)s)")
    return parser


def main() -> None:
    args = arguments().parse_args()
    args.temporary = Path(tempfile.mkdtemp(prefix="virtual_gpu_oom_"))
    args.output.mkdir(parents=True, exist_ok=True)
    count, args.memory = gpus()
    if not count and args.side != "virtual":
        raise SystemExit("there is no GPU here: run the half that needs none with --side virtual")
    args.memory = args.memory or GPUS[args.kind].total_memory
    runs = Runs(args.output / "oom_runs.jsonl")
    pools = {"real": ThreadPoolExecutor(args.real_jobs), "virtual": ThreadPoolExecutor(args.jobs)}
    cases = [BY_NAME[name] for name in TRAININGS]
    found_needs = pools["virtual"].map(lambda case: smallest_memory(case, args, runs), cases)
    needs = {case.name: need for case, need in zip(cases, found_needs, strict=True)}
    waiting: list[Future[None]] = []
    for case in cases:
        for share in SHARES if needs[case.name] else ():
            fraction = share * needs[case.name] / args.memory
            for side in [args.side] if args.side else SIDES:
                if (label(case, share), side) not in runs.found:
                    waiting.append(pools[side].submit(run, case, side, args, runs, label(case, share), fraction))
    for future in waiting:
        future.result()
        found = table(runs, needs)
        (args.output / "virtual_gpu_oom.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.output / "virtual_gpu_oom.md").write_text(markdown(found))
    print((args.output / "virtual_gpu_oom.md").read_text())


if __name__ == "__main__":
    main()
