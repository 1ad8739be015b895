# SPDX-License-Identifier: Apache-2.0
"""Measures one configuration: all modes interleaved in one process, on one model and one optimizer.

A round visits every mode in shuffled order: wrap the model, one step to settle, the shorter of two timed steps, unwrap.
Prints one JSON object a line as results come, so that a run that is cut short loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
from clipping_models import CONFIGS, QUICK, Config
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.clipping import FlashClipEngineMixin

MODES = ["vanilla", "hooks", "functorch", "ghost", "flash_clip"]
SLOW_SECONDS = 1.5  # steps longer than this are timed once a visit


class Engine(FlashClipEngineMixin, opacus.PrivacyEngine):
    pass


class Bench:
    def __init__(self, config: Config, device: torch.device) -> None:
        torch.manual_seed(0)
        self.config, self.device = config, device
        with device:
            self.model = config.build().to(device, config.dtype).train()
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        self.x, self.y = config.inputs(device)
        self.loader = DataLoader(TensorDataset(torch.zeros(8 * config.batch, 1)), batch_size=config.batch)

    def wrap(self, mode: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """(one training step, undo)."""
        if mode == "vanilla":
            return (lambda: self.step(self.model, self.optimizer, functional.cross_entropy)), self.clear
        private = Engine(accountant="rdp").make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **({"criterion": torch.nn.CrossEntropyLoss()} if mode == "ghost" else {}),
        )
        module, optimizer = private[0], private[1]
        loss = private[2] if mode == "ghost" else functional.cross_entropy

        def undo() -> None:
            module.to_standard_module()
            self.clear()

        return (lambda: self.step(module, optimizer, loss, ghost=mode == "ghost")), undo

    def step(self, module: Any, optimizer: Any, loss: Any, ghost: bool = False) -> None:
        optimizer.zero_grad()
        logits = module(self.x)
        extra = {"shape": logits.shape} if ghost and self.config.tokens else {}
        value = loss(logits.flatten(0, -2), self.y.flatten(), **extra)
        del logits
        value.backward()
        optimizer.step()

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

    def visit(self, mode: str) -> dict[str, Any]:
        """{"seconds", "peak_bytes" (None on the CPU), "before_bytes"} or {"failed"}."""
        cuda = self.device.type == "cuda"
        gc.collect()
        before = torch.cuda.memory_allocated() if cuda else None
        undo = self.clear
        try:
            step, undo = self.wrap(mode)
            settled = self.seconds(step)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            times = [self.seconds(step) for _ in range(1 if settled > SLOW_SECONDS else 2)]
            peak = torch.cuda.max_memory_allocated() if cuda else None
            return {"seconds": min(times), "peak_bytes": peak, "before_bytes": before}
        except Exception as error:  # one mode that fails must not take the others with it
            return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
        finally:
            step = None  # type: ignore[assignment]
            undo()
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
    start = time.perf_counter()
    bench = Bench(next(c for c in CONFIGS + QUICK if c.name == arguments.config), device)
    modes, shuffle = list(arguments.modes), random.Random(0)
    gc.disable()
    longest = 0.0
    for number in range(arguments.rounds):
        began = time.perf_counter()
        if number and began - start + longest > arguments.seconds:
            break
        shuffle.shuffle(modes)
        for mode in list(modes):
            result = bench.visit(mode)
            print(json.dumps({"round": number, "mode": mode, **result}), flush=True)
            if "failed" in result:
                modes.remove(mode)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - began)


if __name__ == "__main__":
    main()
