# SPDX-License-Identifier: Apache-2.0
"""What a step of a small, deep model costs the processor: vanilla, flash_clip and hooks in one process.

    python -m benchmarks.clipping.host_time       # a GPT of 24 layers, width 128, batch 4, 32 tokens, one thread
    python -m benchmarks.clipping.host_time --device cuda  # a GPU waits for the host there
    python -m benchmarks.clipping.host_time --profile  # where flash_clip's time goes, by Python function

Prints, for each mode, the median of a step's time, and of its ratio to vanilla within a round. Rounds visit the modes
in shuffled order, each on a model of its own. On the CPU the time is the processor's, so that other processes are not
counted; on a GPU it is the clock's, until the GPU has ended the step.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import random
import statistics
import time
import warnings
from collections.abc import Callable

import opacus
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.profiling.small_gpt import SmallGPT, lm_loss
from opacus_memprof.clipping import FlashClipEngineMixin

MODES = ["vanilla", "flash_clip", "hooks"]
VOCABULARY = 256


class Engine(FlashClipEngineMixin, opacus.PrivacyEngine):
    pass


def training_step(
    mode: str, layers: int, width: int, batch: int, length: int, device: str = "cpu"
) -> Callable[[], None]:
    """A function that trains a model of its own for one step."""
    torch.manual_seed(0)
    model = SmallGPT(VOCABULARY, width, layers, heads=4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens, targets = torch.randint(0, VOCABULARY, (2, batch, length)).to(device)
    if mode != "vanilla":
        model, optimizer, _ = Engine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(tokens), batch_size=batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )

    def step() -> None:
        optimizer.zero_grad()
        lm_loss(model(tokens), targets).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """The processor time, user and system, of this process; on a GPU, the time by the clock."""
    if device == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = (arguments.layers, arguments.width, arguments.batch, arguments.length, arguments.device)
    if arguments.profile:
        step = training_step("flash_clip", *shape)
        step()
        with cProfile.Profile() as profile:
            for _ in range(arguments.rounds):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    steps = {mode: training_step(mode, *shape) for mode in MODES}
    for step in steps.values():
        step()
        step()
    rounds: list[dict[str, float]] = []
    order = list(MODES)
    for _ in range(arguments.rounds):
        random.shuffle(order)
        rounds.append({mode: seconds(steps[mode], arguments.device) for mode in order})
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {machine}, 1 thread; {shape[0]} layers of width {shape[1]}, ", end="")
    print(f"batch {shape[2]}, {shape[3]} tokens; {arguments.rounds} rounds")
    for mode in MODES:
        own = statistics.median(each[mode] for each in rounds)
        ratio = statistics.median(each[mode] / each["vanilla"] for each in rounds)
        least = min(each[mode] for each in rounds) / min(each["vanilla"] for each in rounds)
        print(f"{mode:<12}{1e3 * own:8.1f} ms{ratio:7.2f} x vanilla (of the shortest {least:.2f})")


if __name__ == "__main__":
    main()
