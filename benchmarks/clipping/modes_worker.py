# SPDX-License-Identifier: Apache-2.0
"""Measures one configuration: all modes interleaved in one process, on one model and one optimizer.

A round visits every mode in shuffled order: wrap the model, one step to settle, the shorter of two timed steps, unwrap.
Prints one JSON object a line as results come, so that a run that is cut short loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clipping.models import CONFIGS, QUICK, Config
from benchmarks.clipping.training_modes import GRAPHED, OPACUS, adapt, prepare

MODES = ["vanilla", *OPACUS, *GRAPHED]
SLOW_SECONDS = 1.5  # steps longer than this are timed once a visit


class Bench:
    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.make_model("vanilla")
        self.x, self.y = config.inputs(device)

    def make_model(self, mode: str) -> None:
        """Makes a new model that the mode can train, and its optimizer."""
        torch.manual_seed(0)
        with self.device:
            self.model = adapt(mode, self.config.build().to(self.device, self.config.dtype)).train()
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

    def wrap(self, mode: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """(one training step, undo)."""
        step, undo = prepare(mode, self.model, self.optimizer, self.config.batch)
        return (lambda: step(self.x, self.y)), undo

    def clear(self) -> None:
        """Removes what any mode may have left behind, also where it failed half way."""
        for module in self.model.modules():
            for name in ("activations", "max_batch_len"):
                module.__dict__.pop(name, None)
        for parameter in self.model.parameters():
            parameter.grad = None
            for name in ("summed_grad", "grad_sample", "_norm_sample", "_current_grad_sample", "_forward_counter"):
                if hasattr(parameter, name):
                    delattr(parameter, name)

    def seconds(self, step: Callable[[], None]) -> float:
        self.synchronize()
        start = time.perf_counter()
        step()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def agree(self, goes_on: bool) -> bool:
        """Whether all processes go on."""
        return goes_on

    def visit(self, mode: str) -> dict[str, Any]:
        """{"seconds", "peak_bytes" (None on the CPU), "before_bytes"} or {"failed"}."""
        cuda = self.device.type == "cuda"
        gc.collect()
        before = torch.cuda.memory_allocated() if cuda else None
        undo: Callable[[], None] = lambda: None  # noqa: E731  # of a mode that failed half way
        try:
            step, undo = self.wrap(mode)
            if mode in GRAPHED:  # what is captured then counts as allocated at no other time
                torch.cuda.reset_peak_memory_stats()
                self.seconds(step)
            self.seconds(step)  # the first step of flash_clip proves it, and the second is checked
            settled = self.seconds(step)
            if cuda and mode not in GRAPHED:
                torch.cuda.reset_peak_memory_stats()
            times = [self.seconds(step) for _ in range(1 if settled > SLOW_SECONDS else 2)]
            peak = torch.cuda.max_memory_allocated() if cuda else None
            return {"seconds": min(times), "peak_bytes": peak, "before_bytes": before}
        except Exception as error:  # one mode that fails must not take the others with it
            return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
        finally:
            step = None  # type: ignore[assignment]
            undo()
            self.clear()
            del undo
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--seconds", type=float, default=60, help="stop after the round in which this has passed")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--precision", default="high")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision(arguments.precision)
    device = torch.device("cuda" if torch.cuda.is_available() and arguments.config[:5] != "quick" else "cpu")
    bench = Bench(next(c for c in CONFIGS + QUICK if c.name == arguments.config), device)
    run_rounds(bench, arguments.modes, arguments.seconds, arguments.rounds)


def send(result: dict[str, Any]) -> None:
    """Prints a result. Of several processes, the first one does."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result), flush=True)


def run_rounds(bench: Bench, modes: list[str], seconds: float, rounds: int) -> None:
    """Visits all modes in shuffled order, again and again, and prints what each visit measured.

    A mode that failed is left out of later rounds.
    """
    start, longest = time.perf_counter(), 0.0
    modes, shuffle = list(modes), random.Random(0)
    gc.disable()
    for number in range(rounds):
        began = time.perf_counter()
        if number and not bench.agree(began - start + longest <= seconds):
            break
        shuffle.shuffle(modes)
        for mode in list(modes):
            result = bench.visit(mode)
            send({"round": number, "mode": mode, **result})
            if not bench.agree("failed" not in result):
                modes.remove(mode)
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - began)


if __name__ == "__main__":
    main()
