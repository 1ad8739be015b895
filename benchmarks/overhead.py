# SPDX-License-Identifier: Apache-2.0
"""What profiling costs on a GPU: an allocation and free, and a training step, with the profiler on and off.

One process; the variants are swapped between steps. Each round runs every variant in shuffled order (one step to
settle, then the shorter of two), the garbage collector is off, the ratio is taken within the round and the median over
rounds is quoted: unpaired runs on shared machines differ by more than what is measured.

    python benchmarks/overhead.py --rounds 200 --output overhead.json
"""

import argparse
import contextlib
import ctypes
import gc
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opacus
import torch
from small_gpt import SmallGPT, lm_loss
from torch.utils import cpp_extension

from opacus_memprof import _native, hooks

PAIR_SOURCE = r"""
#include <c10/cuda/CUDACachingAllocator.h>
#include <chrono>
extern "C" double pair_ns(long pairs, long bytes) {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  const auto begin = std::chrono::steady_clock::now();
  for (long i = 0; i < pairs; ++i) { auto data = allocator->allocate(bytes); }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / pairs;
}
"""


@contextlib.contextmanager
def native() -> Iterator[None]:
    yield


@contextlib.contextmanager
def counters() -> Iterator[None]:
    _native.cuda_install()
    try:
        yield
    finally:
        _native.cuda_uninstall()


@contextlib.contextmanager
def events() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="memprof_overhead_") as directory, counters():
        _native.start_events(directory, 1 << 24, "{}")
        try:
            yield
        finally:
            _native.stop_events()


@contextlib.contextmanager
def history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    with torch.profiler.profile(profile_memory=True):
        yield


@contextlib.contextmanager
def full(model: torch.nn.Module, optimizer: Any) -> Iterator[None]:
    """Counters, event file, hook wrappers, module names."""
    with events():
        attachments = [hooks.attach_model(model), hooks.attach_optimizer(optimizer)]
        try:
            yield
        finally:
            for attachment in reversed(attachments):
                attachment.detach()


Variant = Callable[[], contextlib.AbstractContextManager[None]]


def compile_pair_loop(folder: Path) -> Callable[[int, int], float]:
    """An allocate+free loop in C++, through whatever allocator is current: Python would drown the difference."""
    source, library = folder / "pair.cpp", folder / "pair.so"
    source.write_text(PAIR_SOURCE)
    from torch.utils.cpp_extension import CUDA_HOME

    includes = [*cpp_extension.include_paths(), f"{CUDA_HOME or '/usr/local/cuda'}/include"]
    libraries = Path(torch.__file__).parent / "lib"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    command += [f"-isystem{path}" for path in includes] + [f"-L{libraries}", "-lc10", "-lc10_cuda"]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).pair_ns
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_long, ctypes.c_long]
    return lambda pairs, size: float(function(pairs, size))


def measure_pairs(rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds an allocate+free pair, by variant; and the difference to native, paired."""
    variants: dict[str, Variant] = {"native": native, "counters": counters, "events": events, "history": history}
    with tempfile.TemporaryDirectory() as folder:
        pair_ns = compile_pair_loop(Path(folder))
        pair_ns(1000, 512)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name in random.sample(list(variants), len(variants)):
                with variants[name]():
                    pair_ns(2_000, 512)
                    times[name].append(min(pair_ns(10_000, 512) for _ in range(2)))
    return {
        name: {
            "median_ns": statistics.median(found),
            "median_over_native_ns": statistics.median(a - b for a, b in zip(found, times["native"], strict=True)),
        }
        for name, found in times.items()
    }


def training(mode: str, batch_size: int, sequence: int, size: dict[str, int]) -> tuple[Any, Any, Callable[[], None]]:
    """A model, its optimizer, and one training step of it."""
    torch.manual_seed(0)
    model: Any = SmallGPT(**size).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion: Any = lm_loss
    tokens = torch.randint(0, size["vocabulary"], (batch_size, sequence), device="cuda")
    if mode != "vanilla":
        dataset = torch.utils.data.TensorDataset(tokens.cpu())
        made = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(dataset, batch_size=batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **({"criterion": torch.nn.CrossEntropyLoss()} if mode == "ghost" else {}),
        )
        model, optimizer = made[0], made[1]
        if mode == "ghost":

            def criterion(logits: torch.Tensor, targets: torch.Tensor) -> Any:
                return made[2](logits.flatten(0, 1), targets.flatten(), shape=logits.shape)

    def step() -> None:
        logits = model(tokens)
        criterion(logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def paired(step: Callable[[], None], variants: dict[str, Variant], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step, by variant; and the median over rounds of its ratio to the native one of that round."""

    def timed() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            with variants[name]():
                timed()
                times[name].append(min(timed(), timed()))
    return {
        name: {
            "rounds": rounds,
            "median_ms": 1e3 * statistics.median(found),
            "median_ratio": statistics.median(a / b for a, b in zip(found, times["native"], strict=True)),
        }
        for name, found in times.items()
    }


def measure_steps(mode: str, rounds: int, batch_size: int, sequence: int, size: dict[str, int]) -> dict[str, Any]:
    """One model and mode: off, counters only, counters and events, everything, and two others' tools."""
    model, optimizer, step = training(mode, batch_size, sequence, size)
    variants: dict[str, Variant] = {
        "native": native,
        "counters": counters,
        "events": events,
        "full": lambda: full(model, optimizer),
        "history": history,
    }
    for _ in range(5):
        step()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - allocations
    found = paired(step, variants, rounds)
    # Ending a torch.profiler takes far longer than a step: fewer rounds, of its own.
    found["profiler"] = paired(step, {"native": native, "profiler": profiler}, max(rounds // 20, 3))["profiler"]
    return {
        "mode": mode,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "allocations_a_step": allocations,
        "variants": found,
    }


SIZES = {
    "small": ({"vocabulary": 4096, "width": 384, "layers": 8, "heads": 6}, 8, 64),  # bound by the host
    "large": ({"vocabulary": 16384, "width": 1024, "layers": 8, "heads": 16}, 8, 256),  # over 100 M parameters
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--modes", nargs="+", default=["vanilla", "hooks", "ghost"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path, default=Path("overhead.json"))
    arguments = parser.parse_args()
    gc.disable()
    random.seed(0)
    torch.zeros(1, device="cuda")
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "rounds": arguments.rounds,
        "pair": measure_pairs(max(arguments.rounds // 4, 10)),
        "steps": [],
    }
    for name, figures in results["pair"].items():
        print(f"allocate+free {name:9} {figures['median_ns']:8.1f} ns  {figures['median_over_native_ns']:+8.1f} ns")
    for name in arguments.sizes:
        size, batch_size, sequence = SIZES[name]
        for mode in arguments.modes:
            found = measure_steps(mode, arguments.rounds, batch_size, sequence, size)
            results["steps"].append(found)
            arguments.output.write_text(json.dumps(results, indent=1))
            print(f"{mode} ({found['parameters'] / 1e6:.0f} M parameters, {found['allocations_a_step']} allocations)")
            for variant, figures in found["variants"].items():
                print(f"  {variant:9} {figures['median_ms']:8.3f} ms  {100 * (figures['median_ratio'] - 1):+6.2f} %")


if __name__ == "__main__":
    main()
