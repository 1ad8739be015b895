# SPDX-License-Identifier: Apache-2.0
"""Whether grad_sample_mode="auto" picks the best mode: its time and peak beside those of every mode.

    python -m benchmarks.clipping.auto_mode -o auto_mode  # 40 configurations on a GPU: auto_mode.json and auto_mode.md
    python -m benchmarks.clipping.auto_mode --tiny -o auto_mode  # two on the CPU, without peaks: does everything run?

For each configuration a copy of the model is made private in each mode, one after the other; its peak is that of two
steps, above what was there before the copy. Then all modes take steps in turn, in shuffled order, and times are
compared within a round. The choice is right if its median time is at most 3 % above that of the fastest mode, at a peak
at most 2 % above that mode's. Results are written after each configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opacus
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.clipping.auto_configs import CONFIGURATIONS, TINY, Configuration
from benchmarks.clipping.modes import machine
from benchmarks.virtual_gpu.models import MeanCrossEntropy
from opacus_memprof.clipping import FlashClipEngineMixin, GradSampleModuleFlashClip, register_norm_samplers
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.units import format_bytes

OPACUS_GHOST = "ghost, Opacus' samplers"
MODES = ["flash_clip", "ghost", OPACUS_GHOST, "hooks"]  # ghost: with flash_clip's norm samplers, as auto takes it
SLOWER, HIGHER = 1.03, 1.02
ROUNDS = 40


class Engine(FlashClipEngineMixin, opacus.PrivacyEngine):
    """Opacus' engine with flash_clip and auto."""


class Training:
    """A copy of a configuration's model, made private in a mode, that takes steps on one batch.

    Attributes:
        mode: what trains it; of "auto", the mode that was chosen.
        peak_bytes: of two steps, above what was there before the copy. None on the CPU.
    """

    def __init__(self, configuration: Configuration, mode: str, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets, self.mode = inputs, targets, mode
        before = torch.cuda.memory_allocated() if inputs.is_cuda else 0
        torch.manual_seed(0)
        with inputs.device:
            self.model = configuration.model.build().to(inputs.device, configuration.dtype).train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with self.norm_samplers():
            self.module, self.optimizer, *criteria, _ = Engine(accountant="rdp").make_private(
                module=self.model,
                optimizer=torch.optim.Adam(trained, lr=1e-5),
                criterion=MeanCrossEntropy(),
                data_loader=DataLoader(TensorDataset(torch.zeros(8 * len(inputs), 1)), batch_size=len(inputs)),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
                grad_sample_mode="ghost" if mode == OPACUS_GHOST else mode,
            )
        self.criterion = criteria[0] if criteria else MeanCrossEntropy()
        if mode == "auto":
            self.mode = _mode(self.module)
        self.seconds()
        if inputs.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.seconds()
        self.seconds()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before if inputs.is_cuda else None

    def seconds(self) -> float:
        """The time of a step."""
        with self.norm_samplers():
            self.synchronize()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.criterion(self.module(self.inputs), self.targets).backward()
            self.optimizer.step()
            self.synchronize()
            return time.perf_counter() - start

    @contextlib.contextmanager
    def norm_samplers(self) -> Iterator[None]:
        """Opacus looks norm samplers up in each backward."""
        restore = register_norm_samplers(model=self.model) if self.mode == "ghost" else lambda: None
        try:
            yield
        finally:
            restore()

    def synchronize(self) -> None:
        if self.inputs.is_cuda:
            torch.cuda.synchronize()


def _mode(module: torch.nn.Module) -> str:
    if isinstance(module, GradSampleModuleFlashClip):
        return "flash_clip"
    return "ghost" if isinstance(module, GradSampleModuleFastGradientClipping) else "hooks"


def measure(configuration: Configuration, device: torch.device, seconds: float) -> dict[str, Any]:
    """The configuration's row: auto's choice, and each mode's peak, median time and failure."""
    began = time.perf_counter()
    torch.manual_seed(0)
    inputs, targets = (t.to(device) for t in configuration.model.data(configuration.batch))
    inputs = inputs.to(configuration.dtype) if inputs.is_floating_point() else inputs
    trainings: dict[str, Training] = {}
    failed: dict[str, str] = {}
    choice = ""
    for mode in ["auto", *MODES]:
        if mode == choice:
            continue
        gc.collect()
        try:
            training = Training(configuration, mode, inputs, targets)
        except Exception as error:  # a mode that fails must not take the others with it
            failed[mode] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            continue
        if mode == "auto":
            choice = training.mode
        trainings[training.mode] = training
        del training
    rounds = take_turns(trainings, began + seconds)
    modes: dict[str, Any] = {mode: {"failed": why} for mode, why in failed.items()}
    for mode, training in trainings.items():
        times = [each[mode] for each in rounds]
        modes[mode] = {"seconds": statistics.median(times), "peak_bytes": training.peak_bytes}
    return {"configuration": configuration.name, "choice": choice, "modes": modes, "rounds": rounds}


def take_turns(trainings: dict[str, Training], end: float) -> list[dict[str, float]]:
    """The modes' times in each round, at least three; the modes are shuffled in each."""
    shuffle, order, rounds = random.Random(0), list(trainings), []
    gc.disable()
    while len(rounds) < 3 or (len(rounds) < ROUNDS and time.perf_counter() < end):
        shuffle.shuffle(order)
        rounds.append({mode: trainings[mode].seconds() for mode in order})
    gc.enable()
    return rounds


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """The fastest mode, how many times its time and peak the choice takes, and whether that is right."""
    ran = {mode: found for mode, found in row["modes"].items() if "seconds" in found}
    if row["choice"] not in ran:
        return {"fastest": None, "time_ratio": None, "peak_ratio": None, "right": not ran}
    fastest = min(ran, key=lambda mode: ran[mode]["seconds"])
    time_ratio = statistics.median(each[row["choice"]] / each[fastest] for each in row["rounds"])
    peaks = [ran[mode]["peak_bytes"] for mode in (row["choice"], fastest)]
    peak_ratio = None if peaks[0] is None else peaks[0] / peaks[1]
    right = time_ratio <= SLOWER and (peak_ratio is None or peak_ratio <= HIGHER)
    return {"fastest": fastest, "time_ratio": time_ratio, "peak_ratio": peak_ratio, "right": right}


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items() if value)
    lines = [
        "# What auto chooses",
        "",
        about,
        "",
        f"Right in {sum(row['right'] for row in rows)} of {len(rows)} configurations: at most 3 % above the time of "
        "the fastest mode, at a peak at most 2 % above that mode's.",
        "",
        f"| configuration | auto | right | time / fastest | peak / its | {' | '.join(MODES)} |",
        "|---|---|---|---:|---:|" + "---:|" * len(MODES),
    ]
    for row in rows:
        ratios = ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("time_ratio", "peak_ratio")]
        cells = [_cell(row["modes"].get(mode, {})) for mode in MODES]
        said = [row["configuration"], row["choice"] or "failed", "yes" if row["right"] else "no", *ratios, *cells]
        lines.append(f"| {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any]) -> str:
    if "seconds" not in found:
        return "out of memory" if "OutOfMemory" in found.get("failed", "") else "fails"
    peak = "" if found["peak_bytes"] is None else f", {format_bytes(found['peak_bytes'])}"
    return f"{1e3 * found['seconds']:.1f} ms{peak}"


def warm_up(device: torch.device) -> None:
    """Libraries take their workspaces at the first products of forward and of backward: before any mode's peak."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype)).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two small configurations on the CPU")
    parser.add_argument("--seconds", type=float, default=6, help="for each configuration")
    parser.add_argument("--configs", nargs="+", metavar="NAME", help="those whose names begin so")
    parser.add_argument("-o", "--output", type=Path, default=Path("auto_mode"), help="without .json and .md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; --tiny runs two configurations on the CPU")
    device = torch.device("cpu" if arguments.tiny else "cuda")
    warm_up(device)
    results: dict[str, Any] = {"machine": machine(), "rows": []}
    asked = tuple(arguments.configs or [""])
    for configuration in [c for c in (TINY if arguments.tiny else CONFIGURATIONS) if c.name.startswith(asked)]:
        began = time.perf_counter()
        row = measure(configuration, device, arguments.seconds)
        row |= judge(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        results["rows"].append(row | {"wall_seconds": time.perf_counter() - began})
        write_text(arguments.output.with_suffix(".json"), json.dumps(results, indent=1))
        write_text(arguments.output.with_suffix(".md"), markdown(results))
        print(f"{row['configuration']}: {row['choice']}, {'right' if row['right'] else 'wrong'}", flush=True)
    print(markdown(results))


if __name__ == "__main__":
    main()
