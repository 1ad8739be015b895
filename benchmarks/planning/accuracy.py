# SPDX-License-Identifier: Apache-2.0
"""The largest physical batch by planning on the CPU, against the true one on a GPU.

    python -m benchmarks.planning.accuracy --output DIR         # both sides, on a machine with a GPU
    python -m benchmarks.planning.accuracy --output DIR --side planned  # DIR/planned.json; needs no GPU
    python -m benchmarks.planning.accuracy --output DIR --side real  # DIR/real.json; needs DIR/planned.json

12 programs in 3 modes train under a limit on what torch may reserve. The planned side searches as `opacus-memprof plan
--search` does. The real one bisects all batches, with a fresh process for each, and knows nothing of what was planned.
Near the limit larger batches may fit than one that does not, and then there are several that fit while one more does
not: the real side looks for the one beside the planned batch, too. Then each program gets twice the planned batch, and
the plan's first advice that it has tried is followed on the GPU. Where both sides are there, the table is in
DIR/planning.md. Both sides need the same torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

LIMIT = 3 * 2**30
HIGH = 4096
CASE = Path(__file__).with_name("case.py")
MODELS = ("gpt", "gpt-small", "gpt2", "gpt2-lora", "llama-lora", "bert", "vit", "wide-head")
MODELS += ("cifar-cnn", "text-cnn", "audio", "unet")
MODES = ("hooks", "ghost", "flash_clip")
SIDE_BY_SIDE = 12  # on one GPU; each has its own limit, and a context
FITS, OUT_OF_MEMORY, FAILED = 0, 3, 1  # exit codes of a real run

Name = tuple[str, str]  # model and mode


def arguments_of(name: Name, batch: int | None = None) -> list[str]:
    """Of case.py."""
    given = ["--model", name[0], "--mode", name[1], "--limit", str(LIMIT)]
    return given if batch is None else [*given, "--batch-size", str(batch)]


def plan(output: Path, kind: str, names: Sequence[Name]) -> dict[str, Any]:
    """The planned side: by "MODEL MODE" the largest batch, and the first advice for twice as many samples."""
    from opacus_memprof.errors import MemprofError
    from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram, Range
    from opacus_memprof.planning.runs import open_runs
    from opacus_memprof.planning.table import PlannedCell, fill
    from opacus_memprof.planning.verdict import judge

    begun = time.monotonic()
    searched = Range("batch-size", 1, HIGH)
    programs = [PlannedProgram(str(CASE), tuple(arguments_of(name))) for name in names]
    cells = [
        PlannedCell(name[1], PlannedConfiguration(program, kind)) for name, program in zip(names, programs, strict=True)
    ]
    results: dict[str, Any] = {}
    with open_runs(output / "plan", resume=True, on_end=dot) as runs:
        fill(runs, cells, searched, lambda started: None)
        for name, cell in zip(names, cells, strict=True):
            found: dict[str, Any] = {"largest": cell.largest, "runs": len(cell.runs), "error": cell.error}
            results[" ".join(name)] = found
            if not cell.largest or 2 * cell.largest > HIGH:
                continue
            try:
                verdict = judge(runs, searched.apply(cell.configuration, 2 * cell.largest), "mode")
            except MemprofError as error:
                found["error"] = str(error)
                continue
            first = next((one for one in verdict.advice if one.tried is not None and one.tried.fits), None)
            if first is not None and first.applied is not None:
                followed = {"arguments": first.applied.program.arguments, "changes": first.applied.changes}
                found["advice"] = {"title": first.title, **followed}
    print()
    return {**machine(), "gpu": kind, "seconds": round(time.monotonic() - begun), "limit": LIMIT, "cases": results}


def dot(*about: object) -> None:
    print(".", end="", flush=True)


def measure(names: Sequence[Name], planned: Mapping[str, Any]) -> dict[str, Any]:
    """The real side: by "MODEL MODE" the largest batch, and whether the advice fits."""
    import benchmarks.planning.case
    import benchmarks.virtual_gpu.models  # noqa: F401
    from opacus_memprof.clipping import register_norm_samplers  # noqa: F401

    begun = time.monotonic()
    results: dict[str, Any] = {}
    searches = {" ".join(name): bisected(name) for name in names}
    for name, found in side_by_side(searches).items():
        results[name] = {"largest": found}
    largest = {name: one["largest"] for name, one in planned.get("cases", {}).items() if one["largest"]}
    searches = {name: beside((name.split()[0], name.split()[1]), start) for name, start in largest.items()}
    for name, found in side_by_side(searches).items():
        results[name]["beside_planned"] = found
    tried = {name: one["advice"] for name, one in planned.get("cases", {}).items() if one.get("advice")}
    for name, found in side_by_side({name: once(advice) for name, advice in tried.items()}).items():
        results[name]["advice"] = found
    return {**machine(), "seconds": round(time.monotonic() - begun), "limit": LIMIT, "cases": results}


Asked = tuple[list[str], list[dict[str, Any]]]  # arguments, and changes that a plan has applied
Search = Generator[Asked, int, Any]  # sends exit codes of real runs


def bisected(name: Name) -> Search:
    """The largest batch that fits. None where one failed."""
    good, bad = 0, HIGH + 1
    while bad - good > 1:
        batch = (good + bad) // 2
        code = yield arguments_of(name, batch), []
        if code == FAILED:
            return None
        good, bad = (batch, bad) if code == FITS else (good, batch)
    return good


def beside(name: Name, planned: int) -> Search:
    """Returns a batch size that fits while one more sample does not.

    Searches from the planned size in steps that double, then bisects. None if a run failed.
    """
    good, bad, step, batch = 0, HIGH + 1, 1, planned
    while bad - good > 1:
        code = yield arguments_of(name, batch), []
        if code == FAILED:
            return None
        good, bad = (batch, bad) if code == FITS else (good, batch)
        if good == 0 or bad > HIGH:
            batch, step = (batch + step if code == FITS else max(batch - step, 1)), 2 * step
            batch = min(batch, HIGH)
        else:
            batch = (good + bad) // 2
    return good


def once(advice: Mapping[str, Any]) -> Search:
    """Whether advice fits."""
    code = yield list(advice["arguments"]), list(advice["changes"])
    return {FITS: "fits", OUT_OF_MEMORY: "out of memory"}.get(code, "failed")


def side_by_side(searches: Mapping[str, Search]) -> dict[str, Any]:
    """Runs what the searches ask for, in processes of their own, and returns what they find."""
    fork = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    waiting = [(name, next(search)) for name, search in searches.items()]
    running: dict[int, tuple[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            name, asked = waiting.pop(0)
            process = fork.Process(target=train, args=asked)
            process.start()
            running[process.sentinel] = name, process
        for sentinel in wait(list(running)):
            name, process = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            try:
                waiting.append((name, searches[name].send(process.exitcode)))
            except StopIteration as end:
                found[name] = end.value
                print(f"{name}: {end.value}", flush=True)
    return found


def train(arguments: list[str], changes: list[dict[str, Any]]) -> None:
    """In a process of its own: exits with one of the codes above."""
    import torch

    from benchmarks.planning import case
    from opacus_memprof.planning.changes import OpacusSetup

    for change in changes:
        if change["kind"] == "allocator_setting":
            torch.cuda.memory._set_allocator_settings(change["value"])
    OpacusSetup(changes)
    try:
        case.main(arguments)
        torch.cuda.synchronize()
        code = FITS
    except torch.OutOfMemoryError:
        code = OUT_OF_MEMORY
    except Exception as error:
        print(f"{' '.join(arguments)}: {error}", file=sys.stderr)
        code = FAILED
    sys.stdout.flush()
    os._exit(code)


def machine() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "cores": os.cpu_count()}


def markdown(planned: Mapping[str, Any], real: Mapping[str, Any]) -> str:
    """The table, and how many are within one of a true batch, above it by more than 1 %, and fit with the advice."""
    rows, near, above, bisected_too, fitting, advised = [], 0, 0, 0, 0, 0
    for name, one in planned["cases"].items():
        true = real["cases"].get(name, {}).get("beside_planned")
        whole = real["cases"].get(name, {}).get("largest")
        advice = real["cases"].get(name, {}).get("advice")
        largest = one["largest"]
        if true is None or largest is None:
            rows.append(f"| {name} | {largest} | {true} | | {whole} | {one['error']} |")
            continue
        near += abs(largest - true) <= 1
        above += largest > 1.01 * true
        bisected_too += whole is not None and abs(largest - whole) <= 1
        advised += advice is not None
        fitting += advice == "fits"
        title = one.get("advice", {}).get("title", "")
        followed = f"{title}: {advice}" if advice else ""
        rows.append(f"| {name} | {largest} | {true} | {largest - true:+d} | {whole} | {followed} |")
    lines = [
        f"The largest physical batch of two steps with at most {LIMIT / 2**30:g} GiB reserved: planned for a virtual "
        f"{planned['gpu']} (torch {planned['torch']}, {planned['cores']} cores, {planned['seconds']} s), and on a GPU "
        f"(torch {real['torch']}, {real['seconds']} s).",
        "",
        f"Within one of a batch that fits there while one more does not: {near} of {len(rows)}. More than 1 % above "
        f"it: {above}. Within one of what bisecting all batches finds there: {bisected_too}. Twice the planned batch "
        f"with the plan's first advice fits there: {fitting} of {advised}.",
        "",
        "| training | planned | true | difference | all bisected | advice for twice the planned batch, on the GPU |",
        "|---|---:|---:|---:|---:|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that forks must not initialise CUDA
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--side", choices=["planned", "real"], help="one side alone")
    parser.add_argument("--kind", default="h200", help="the virtual GPU (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    names = [(model, mode) for model in args.models for mode in args.modes]
    args.output.mkdir(parents=True, exist_ok=True)
    files = {side: args.output / f"{side}.json" for side in ("planned", "real")}
    if args.side != "real":
        files["planned"].write_text(json.dumps(plan(args.output, args.kind, names), indent=1) + "\n")
    planned = json.loads(files["planned"].read_text()) if files["planned"].exists() else {}
    if args.side != "planned":
        files["real"].write_text(json.dumps(measure(names, planned), indent=1) + "\n")
    if all(file.exists() for file in files.values()):
        text = markdown(planned, json.loads(files["real"].read_text()))
        (args.output / "planning.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
