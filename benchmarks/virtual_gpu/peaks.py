# SPDX-License-Identifier: Apache-2.0
"""Compares the virtual GPU with the real one: the same trainings on both, and a table of what differs.

    python -m benchmarks.virtual_gpu.peaks --output DIR                   # on a machine with the GPU
    python -m benchmarks.virtual_gpu.peaks --output DIR --only ghost T5   # cases with "ghost" or "T5" in the name
    python -m benchmarks.virtual_gpu.peaks --output DIR --side virtual    # the other half, perhaps on another machine
    python -m benchmarks.virtual_gpu.peaks --output DIR --drawn 60 --seed 7   # convolutional trainings drawn at random

Every run is a process of its own under a profiling session. Those on the real GPU share it, a few at a time; those on
the virtual one run side by side on the CPU's cores. Each is appended to DIR/runs.jsonl as it ends, and a run that is
there is not repeated. DIR/virtual_gpu.json and .md are written anew from it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.virtual_gpu.cases import CASES, Case, drawn

SIDES = ("real", "virtual")
TIMEOUT_S = 240
MIB = 2**20
Run = dict[str, Any]


class Runs:
    """The runs that have ended, by case and side, kept in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self.found: dict[tuple[str, str], Run] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                self.found[run["case"], run["side"]] = run

    def add(self, run: Run) -> None:
        with self._lock:
            self.found[run["case"], run["side"]] = run
            with self.path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            state = f"{run['requested'] / MIB:.1f} MiB" if run["ok"] else run["error"]
            print(f"{run['side']:>7}  {run['case']}: {state}, {run['wall_s']} s", flush=True)

    def done(self, case: Case, side: str) -> bool:
        return self.found.get((case.name, side), {"ok": False})["ok"]


def file_name(name: str, side: str) -> str:
    return f"{side}-{''.join(c if c.isalnum() else '_' for c in name)}"


def start_rank(
    case: Case, side: str, rank: int, port: int, args: argparse.Namespace, stem: Path, fraction: float
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.virtual_gpu.worker", case.name]
    command += ["--result", f"{stem}-{rank}.json", "--profile", f"{stem}-profile"]
    if fraction:
        command += ["--fraction", str(fraction)]
    if side == "virtual":
        command += ["--virtual", args.kind, *(["--memory", str(args.memory)] if args.memory else [])]
    ours = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if case.compiled:
        ours["TORCHINDUCTOR_CACHE_DIR"] = f"{stem}-inductor"  # what is compiled anew allocates to measure kernels
    if case.ranks > 1:
        ours |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
        ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Path(f"{stem}-{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=os.environ | ours, stdout=log, stderr=subprocess.STDOUT, text=True)


def run(
    case: Case, side: str, args: argparse.Namespace, runs: Runs, name: str | None = None, fraction: float = 0
) -> None:
    """Runs a case to its end and keeps the figures of the first rank.

    `name` replaces the case's own name; `fraction` of the GPU's memory may be used, 0 being all.
    """
    name = name or case.name
    stem = args.temporary / file_name(name, side)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start_rank(case, side, rank, port, args, stem, fraction) for rank in range(case.ranks)]
    for process in processes:
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    result = Path(f"{stem}-0.json")
    if result.is_file():
        found = json.loads(result.read_text())
    else:
        found = {"ok": False, "error": f"ended with {processes[0].returncode}", "wall_s": TIMEOUT_S}
    if not found["ok"]:
        found["log"] = result.with_suffix(".log").read_text()[-2000:]
    runs.add({"case": name, "side": side, **found})


# --- what differs ---


def allocation_differences(case: Case, temporary: Path, most: int = 12) -> list[dict[str, Any]]:
    """What one run has allocated more often than the other, the largest first."""
    counts: list[Counter[tuple[str, int]]] = []
    for side in SIDES:
        path = temporary / f"{file_name(case.name, side)}-0.json.allocations.gz"
        if not path.is_file():
            return []
        with gzip.open(path, "rt") as file:
            counts.append(Counter({(op, size): count for op, size, count in json.load(file)}))
    real, virtual = counts
    keys = [key for key in real | virtual if real[key] != virtual[key]]
    keys.sort(key=lambda key: -key[1])
    return [{"op": op, "bytes": size, "real": real[op, size], "virtual": virtual[op, size]} for op, size in keys[:most]]


def compare(case: Case, runs: Runs, temporary: Path, before: dict[str, Any]) -> dict[str, Any] | None:
    """A row of the table; None where neither side has run."""
    real, virtual = (runs.found.get((case.name, side)) for side in SIDES)
    if real is None or virtual is None:
        return None
    row: dict[str, Any] = {"case": case.name, "ok": real["ok"] and virtual["ok"]}
    row |= {
        f"{side}_error": result["error"]
        for side, result in zip(SIDES, (real, virtual), strict=True)
        if not result["ok"]
    }
    if not row["ok"]:
        return row
    for name in ("requested", "allocated", "reserved"):
        row[name] = [real[name], virtual[name]]
        row[f"{name}_off"] = virtual[name] / real[name] - 1
    row["categories_equal"] = real["categories"] == virtual["categories"]
    row["seconds"] = [real["wall_s"], virtual["wall_s"]]
    if not row["categories_equal"]:
        names = sorted(real["categories"].keys() | virtual["categories"].keys())
        pairs = {name: [result["categories"].get(name, 0) for result in (real, virtual)] for name in names}
        row["categories"] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if row["requested_off"] or row["reserved_off"] or not row["categories_equal"]:
        segments = [Counter(dict(map(tuple, result["segments"]))) for result in (real, virtual)]
        sizes = sorted(segments[0] | segments[1], reverse=True)
        row["segments"] = [
            [size, *(result[size] for result in segments)] for size in sizes if segments[0][size] != segments[1][size]
        ]
        row["allocations"] = allocation_differences(case, temporary) or before.get("allocations", [])
    return row


def percent(off: float) -> str:
    return "equal" if off == 0 else f"{100 * off:+.3f} %"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["ok"]]
    if not good:
        return {"runs": len(rows), "compared": 0}
    reserved = [abs(row["reserved_off"]) for row in good]
    return {
        "runs": len(rows),
        "compared": len(good),
        "requested_equal": sum(row["requested_off"] == 0 for row in good),
        "requested_worst": max(abs(row["requested_off"]) for row in good),
        "reserved_equal": sum(row["reserved_off"] == 0 for row in good),
        "reserved_median": statistics.median(reserved),
        "reserved_worst": max(reserved),
        "categories_equal": sum(row["categories_equal"] for row in good),
    }


def markdown(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    total = summary(rows)
    named = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items())
    lines = [f"Peaks on the real GPU and on the virtual one. {named}.", ""]
    if total["compared"]:
        lines += [
            f"**Requested equal to the byte in {total['requested_equal']} of {total['compared']}, worst "
            f"{100 * total['requested_worst']:.3f} %. Reserved: median {100 * total['reserved_median']:.2f} %, worst "
            f"{100 * total['reserved_worst']:.2f} %, equal in {total['reserved_equal']}. Categories equal in "
            f"{total['categories_equal']}.** {total['runs'] - total['compared']} did not run on both.",
            "",
        ]
    lines += [
        "| training | requested, MiB | virtual | allocated | reserved, MiB | virtual | categories | s | s |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        if not row["ok"]:
            errors = "; ".join(f"{side}: {row[f'{side}_error']}" for side in SIDES if f"{side}_error" in row)
            lines.append(f"| {row['case']} | {errors.replace('|', '/')} | | | | | | | |")
            continue
        seconds = " | ".join(f"{value:.0f}" for value in row["seconds"])
        lines.append(
            f"| {row['case']} | {row['requested'][0] / MIB:.1f} | {percent(row['requested_off'])} "
            f"| {percent(row['allocated_off'])} | {row['reserved'][0] / MIB:.0f} | {percent(row['reserved_off'])} "
            f"| {'equal' if row['categories_equal'] else 'differ'} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def write_table(runs: Runs, args: argparse.Namespace) -> None:
    path = args.output / "virtual_gpu.json"
    before = {row["case"]: row for row in json.loads(path.read_text())["rows"]} if path.is_file() else {}
    compared = [compare(case, runs, args.temporary, before.get(case.name, {})) for case in args.cases]
    rows = [row for row in compared if row]
    named = ("gpu", "total_memory", "driver", "torch", "cuda", "cudnn", "opacus", "python")
    measured = [result for (_, side), result in runs.found.items() if result["ok"] and side == "real"]
    machine = {key: measured[0][key] for key in named if key in measured[0]} if measured else {}
    path.write_text(json.dumps({"machine": machine, "summary": summary(rows), "rows": rows}, indent=1) + "\n")
    (args.output / "virtual_gpu.md").write_text(markdown(rows, machine))


def gpus() -> tuple[int, int]:
    """How many real GPUs there are, and the bytes of the first, asked in a process of its own."""
    program = "import torch; n = torch.cuda.device_count(); "
    program += "print(n, torch.cuda.get_device_properties(0).total_memory if n else 0)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, memory = answer.stdout.split()
    return int(count), int(memory)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--kind", default="h200", help="the virtual GPU (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases with one of these in their name")
    parser.add_argument("--drawn", type=int, metavar="COUNT", help="this many drawn convolutional trainings instead")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others (default: %(default)s)")
    parser.add_argument("--side", choices=SIDES, help="this half alone")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 4), help="virtual runs at once")
    parser.add_argument("--real-jobs", type=int, help="runs at once on the real GPU (default: 3, of drawn ones 6)")
    parser.add_argument("--temporary", type=Path, help="for profiles and logs (default: a new folder)")
    return parser


def main() -> None:
    args = arguments().parse_args()
    args.cases = [drawn(args.seed, number) for number in range(args.drawn)] if args.drawn else CASES
    args.temporary = args.temporary or Path(tempfile.mkdtemp(prefix="virtual_gpu_"))
    args.output.mkdir(parents=True, exist_ok=True)
    args.temporary.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.output / "runs.jsonl")
    count, args.memory = gpus()
    if not count and args.side != "virtual":
        raise SystemExit("there is no GPU here: run the half that needs none with --side virtual")
    measured = [result["total_memory"] for (_, side), result in runs.found.items() if side == "real" and result["ok"]]
    args.memory = args.memory or next(iter(measured), 0)
    pools = {
        "real": ThreadPoolExecutor(args.real_jobs or (6 if args.drawn else 3)),
        "virtual": ThreadPoolExecutor(args.jobs),
    }
    waiting: list[Future[None]] = []
    for case in args.cases:
        for side in [args.side] if args.side else SIDES:
            enough = side == "virtual" or case.ranks <= count
            chosen = any(text in case.name for text in args.only)
            if chosen and enough and not runs.done(case, side):
                waiting.append(pools[side].submit(run, case, side, args, runs))
    for future in waiting:
        future.result()
        write_table(runs, args)
    print((args.output / "virtual_gpu.md").read_text())


if __name__ == "__main__":
    main()
