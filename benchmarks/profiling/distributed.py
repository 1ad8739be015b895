# SPDX-License-Identifier: Apache-2.0
"""What profiling costs a step of distributed training: the allocator, events and hooks on and off.

As overhead.py does it, in one run: each round runs both variants in an order that all ranks share, one step to settle
and then the shorter of two; a step takes as long as the slowest rank's, and the median over rounds of the
ratio within the round is quoted.

    torchrun --nproc-per-node 2 -m benchmarks.profiling.distributed --model gpt --wrap fsdp2 --rounds 20
"""

import contextlib
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opacus
import torch
import torch.distributed as dist

from opacus_memprof import hooks
from opacus_memprof.recording import allocators, native

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_distributed


@contextlib.contextmanager
def plain(model: Any, optimizer: Any, device: str) -> Iterator[None]:
    yield


@contextlib.contextmanager
def profiled(model: Any, optimizer: Any, device: str) -> Iterator[None]:
    """All that a session does while training runs."""
    allocators.install(device)
    with tempfile.TemporaryDirectory(prefix="memprof_overhead_") as directory:
        native.start_events(directory, 1 << 24, "{}")
        attachments = [hooks.attach_model(model), hooks.attach_optimizer(optimizer)]
        try:
            yield
        finally:
            for attachment in reversed(attachments):
                attachment.detach()
            native.stop_events()
            allocators.uninstall_device(device)


VARIANTS = {"plain": plain, "profiled": profiled}


def slowest(seconds: float, device: torch.device) -> float:
    """The longest of all ranks' times."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest.item())


def timed(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return slowest(time.perf_counter() - begin, device)


def measure(args: Any, device: torch.device) -> dict[str, Any]:
    model, optimizer, train = train_distributed.prepare(args, device)
    tokens = train_distributed.batch(args, device)

    def step() -> None:
        train(tokens)

    for _ in range(3):
        step()
    shuffled = random.Random(0)  # the same on every rank: collectives must meet
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in shuffled.sample(list(VARIANTS), len(VARIANTS)):
            with VARIANTS[name](model, optimizer, device.type):
                timed(step, device)
                times[name].append(min(timed(step, device), timed(step, device)))
    ratios = [a / b for a, b in zip(times["profiled"], times["plain"], strict=True)]
    return {
        **{key: getattr(args, key) for key in ("model", "wrap", "mode", "bf16", "batch", "length", "rounds")},
        "world_size": dist.get_world_size(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "median_ms": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "median_ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else None,
    }


def main() -> None:
    parser = train_distributed.arguments()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("distributed.json"), help="a result more is added to it")
    args = parser.parse_args()
    device = train_distributed.start()
    gc.disable()
    found = measure(args, device)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        found |= {"machine": name, "torch": torch.__version__, "opacus": opacus.__version__}
        results = json.loads(args.output.read_text()) if args.output.exists() else []
        args.output.write_text(json.dumps([*results, found], indent=1))
        times = ", ".join(f"{variant} {ms:.2f} ms" for variant, ms in found["median_ms"].items())
        over = 100 * (found["median_ratio"] - 1)
        print(f"{args.model} {args.wrap}, {found['world_size']} ranks: {times}, {over:+.2f} %", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
