# SPDX-License-Identifier: Apache-2.0
"""How long a training takes on a virtual GPU, by its parameters, layers and steps. Needs no GPU.

    python -m benchmarks.virtual_gpu.run_time --output DIR

Each row is a process of its own, one after the other: a GPT made on the device and trained under a profiling session.
Seconds are of the whole process, and of its parts; the memory is the most that the process held (resident set).
DIR/virtual_gpu_time.json and .md are written anew after each.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
BATCH, TOKENS, VOCABULARY = 8, 128, 32000


@dataclass(frozen=True)
class Row:
    """One training of a GPT with 64 wide heads."""

    group: str
    mode: str
    width: int
    layers: int
    steps: int = 3


ROWS = (
    *(Row("parameters", "hooks", width, 12) for width in (256, 512, 1024, 2048)),
    *(Row("layers", "hooks", 512, layers) for layers in (6, 24, 48)),
    *(Row("steps", "hooks", 512, 12, steps) for steps in (1, 10, 30)),
    *(Row("10^9 parameters", mode, 2048, 18) for mode in ("vanilla", "hooks", "ghost", "flash_clip")),
)


def train(row: Row, kind: str) -> dict[str, Any]:
    """Trains in this process and returns seconds and what the allocator counted."""
    from opacus_memprof import virtual_gpu

    virtual_gpu.start(kind)
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import opacus_memprof
    from benchmarks.virtual_gpu.models import MeanCrossEntropy
    from opacus_memprof.experiments.models import Transformer

    times = {"imports": time.perf_counter() - STARTED}
    with opacus_memprof.profile(tempfile.mkdtemp(prefix="virtual_gpu_time_"), device="cuda") as session:
        with torch.device("cuda"):
            module: Any = Transformer(VOCABULARY, row.width, row.layers, row.width // 64, TOKENS)
        parameters = sum(p.numel() for p in module.parameters())
        optimizer: Any = torch.optim.AdamW(module.parameters())
        criterion: Any = MeanCrossEntropy()
        tokens = torch.randint(VOCABULARY, (BATCH * row.steps, TOKENS))
        loader: Any = DataLoader(TensorDataset(tokens, tokens), batch_size=BATCH)
        if row.mode == "vanilla":
            session.attach(module, optimizer)
        else:
            module, optimizer, *criteria, loader = opacus_memprof.PrivacyEngine().make_private(
                module=module,
                optimizer=optimizer,
                criterion=criterion,
                data_loader=loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
                grad_sample_mode=row.mode,
            )
            criterion = criteria[0] if criteria else criterion
        times["model"] = time.perf_counter() - STARTED - times["imports"]
        steps = []
        for inputs, targets in loader:
            begun = time.perf_counter()
            criterion(module(inputs.to("cuda")), targets.to("cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - begun)
        ended = time.perf_counter()
        reserved = torch.cuda.max_memory_reserved()
    times |= {"first_step": steps[0], "other_steps_each": sum(steps[1:]) / max(1, len(steps) - 1)}
    times["profile"] = time.perf_counter() - ended
    return {
        "parameters": parameters,
        "reserved": reserved,
        "seconds": {name: round(value, 2) for name, value in times.items()},
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }


def measure(row: Row, kind: str) -> dict[str, Any]:
    """Runs the row in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.virtual_gpu.run_time",
        "--row",
        json.dumps(asdict(row)),
        "--kind",
        kind,
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = {**asdict(row), "wall_s": round(time.perf_counter() - begun, 1)}
    if done.returncode:
        return found | {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return found | json.loads(done.stdout.splitlines()[-1])


def markdown(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    named = ", ".join(f"{key} {value}" for key, value in machine.items())
    lines = [
        f"Seconds of a training on a virtual GPU: {BATCH} samples of {TOKENS} tokens, AdamW. {named}.",
        "",
        "| by | mode | parameters, 10^6 | layers | steps | seconds | imports | model | first step | others, each "
        "| profile | resident, MiB | GPU's reserved, MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shown = [row["group"], row["mode"]]
        if "error" in row:
            lines.append(f"| {' | '.join(shown)} | | {row['layers']} | {row['steps']} | {row['error']} | | | | | | | |")
            continue
        shown += [f"{row['parameters'] / 1e6:.0f}", str(row["layers"]), str(row["steps"]), f"{row['wall_s']:.1f}"]
        shown += [f"{value:.2f}" for value in row["seconds"].values()]
        shown += [f"{row['resident_bytes'] / 2**20:.0f}", f"{row['reserved'] / 2**20:.0f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("."))
    parser.add_argument("--kind", default="h200", help="the virtual GPU (default: %(default)s)")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # of the process that trains
    return parser


def main() -> None:
    args = arguments().parse_args()
    if args.row:
        print(json.dumps(train(Row(**json.loads(args.row)), args.kind)))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    machine: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        rows.append(measure(row, args.kind))
        print(rows[-1], flush=True)
        if "torch" in rows[-1]:
            machine["torch"] = rows[-1].pop("torch")
        content = {"machine": machine, "rows": rows}
        (args.output / "virtual_gpu_time.json").write_text(json.dumps(content, indent=1) + "\n")
        (args.output / "virtual_gpu_time.md").write_text(markdown(rows, machine))


if __name__ == "__main__":
    main()
