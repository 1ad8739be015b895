# SPDX-License-Identifier: Apache-2.0
"""What profiling costs: an allocation and its free, and a training step in every mode, with the profiler on and off.

One process; the variants are swapped between steps. Each round runs every variant in shuffled order (three steps to
settle, for the interpreter forgets its specialised code when something is replaced; then the shortest of six, for what
else a shared machine does only lengthens a step), the garbage collector is off, the ratio is taken within the round and
the median over rounds is quoted with its standard error: unpaired runs differ by more than what is measured.

    python -m benchmarks.profiling.overhead --rounds 60 --output overhead_h200.json

Writes the JSON file after each mode, and beside it the same as a Markdown table.
"""

import argparse
import ctypes
import gc
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opacus
import torch
from torch.utils import cpp_extension

from benchmarks.profiling import overhead_variants as variants_of
from benchmarks.profiling.small_gpt import SmallGPT, lm_loss

PAIR_SOURCE = r"""
#include <c10/cuda/CUDACachingAllocator.h>
#include <algorithm>
#include <chrono>
#include <vector>
extern "C" double pair_ns(long pairs, long bytes) {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  const auto begin = std::chrono::steady_clock::now();
  for (long i = 0; i < pairs; ++i) { auto data = allocator->allocate(bytes); }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / pairs;
}
// The median; before each pair, other memory evicts the allocators' data from the caches.
extern "C" double cold_pair_ns(long pairs, long bytes) {
  static std::vector<long> others(std::size_t{4} << 17);  // 4 MiB
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  std::vector<double> times(pairs);
  for (double& time : times) {
    for (std::size_t i = 0; i < others.size(); i += 8) others[i] += 1;
    const auto begin = std::chrono::steady_clock::now();
    { auto data = allocator->allocate(bytes); }
    time = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
  }
  std::nth_element(times.begin(), times.begin() + pairs / 2, times.end());
  return times[pairs / 2];
}
"""

SIZES = {
    "tiny": ({"vocabulary": 64, "width": 16, "layers": 8, "heads": 2}, 2, 8),  # bound by the host, also on a CPU
    "small": ({"vocabulary": 4096, "width": 384, "layers": 8, "heads": 6}, 8, 64),  # bound by the host
    "large": ({"vocabulary": 16384, "width": 1024, "layers": 8, "heads": 16}, 8, 256),  # over 100 M parameters
}
SETTLING = 3  # steps
TIMED = 6  # steps, of which the shortest counts
MODES = ("vanilla", "hooks", "functorch", "ew", "ghost")
VARIANTS = ("counters", "events", "full", "history", "profiler")


PairLoop = Callable[[int, int], float]  # pairs, bytes → nanoseconds a pair


def compile_pair_loops(folder: Path) -> tuple[PairLoop, PairLoop]:
    """Allocate+free loops in C++, through whatever allocator is current: Python would drown the difference.

    The second finds its caches cold, as a training step leaves them.
    """
    source, library = folder / "pair.cpp", folder / "pair.so"
    source.write_text(PAIR_SOURCE)
    includes = [*cpp_extension.include_paths(), f"{cpp_extension.CUDA_HOME or '/usr/local/cuda'}/include"]
    libraries = Path(torch.__file__).parent / "lib"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    command += [f"-isystem{path}" for path in includes] + [f"-L{libraries}", "-lc10", "-lc10_cuda"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    for function in (loaded.pair_ns, loaded.cold_pair_ns):
        function.restype = ctypes.c_double
        function.argtypes = [ctypes.c_long, ctypes.c_long]
    return loaded.pair_ns, loaded.cold_pair_ns


def measure_pairs(rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds an allocate+free pair on the GPU, by variant; and the difference to native, paired."""
    variants: dict[str, variants_of.Variant] = {
        "native": variants_of.without,
        "counters": variants_of.counters_on("cuda"),
        "events": variants_of.events_on("cuda"),
        "history": variants_of.history,
    }
    with tempfile.TemporaryDirectory() as folder:
        pair_ns, cold_pair_ns = compile_pair_loops(Path(folder))
        pair_ns(1000, 512)
        times: dict[str, list[float]] = {name: [] for name in variants}
        cold: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name in random.sample(list(variants), len(variants)):
                with variants[name]():
                    pair_ns(2_000, 512)
                    times[name].append(min(pair_ns(1_000, 512) for _ in range(20)))
                    cold[name].append(cold_pair_ns(100, 512))
    over = {name: [a - b for a, b in zip(found, times["native"], strict=True)] for name, found in times.items()}
    cold_over = {name: [a - b for a, b in zip(found, cold["native"], strict=True)] for name, found in cold.items()}
    return {
        name: {
            "median_ns": statistics.median(times[name]),
            "median_over_native_ns": statistics.median(over[name]),
            "cold_median_ns": statistics.median(cold[name]),
            "cold_median_over_native_ns": statistics.median(cold_over[name]),
        }
        for name in variants
    }


def training(mode: str, device: str, name: str) -> tuple[Any, Any, Callable[[], None]]:
    """A model, its optimizer, and one training step of it."""
    size, batch_size, sequence = SIZES[name]
    torch.manual_seed(0)
    model: Any = SmallGPT(**size).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion: Any = lm_loss
    tokens = torch.randint(0, size["vocabulary"], (batch_size, sequence), device=device)
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


def paired(
    step: Callable[[], None], variants: dict[str, variants_of.Variant], rounds: int
) -> dict[str, dict[str, float]]:
    """Returns milliseconds a step and the ratio to the native run, by variant.

    The ratio is the median over rounds of the ratio within a round, with that median's standard error.
    """

    def timed() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            with variants[name]():
                for _ in range(SETTLING):
                    timed()
                times[name].append(min(timed() for _ in range(TIMED)))
        gc.collect()
    ratios = {name: [a / b for a, b in zip(found, times["native"], strict=True)] for name, found in times.items()}
    return {
        name: {
            "rounds": rounds,
            "median_ms": 1e3 * statistics.median(found),
            "median_ratio": statistics.median(ratios[name]),
            "standard_error": error_of_median(ratios[name]),
        }
        for name, found in times.items()
    }


def error_of_median(sample: list[float]) -> float:
    """The standard error of the sample's median, by bootstrap (Efron, 1979)."""
    return statistics.pstdev(statistics.median(random.choices(sample, k=len(sample))) for _ in range(200))


def measure_steps(mode: str, rounds: int, device: str, name: str, wanted: list[str]) -> dict[str, Any]:
    """Measures one model and mode: off, and each wanted variant.

    The variants are counters only, counters and events, everything, and the tools of two other projects.
    """
    model, optimizer, step = training(mode, device, name)
    variants: dict[str, variants_of.Variant] = {
        "native": variants_of.without,
        "counters": variants_of.counters_on(device),
        "events": variants_of.events_on(device),
        "full": variants_of.full_on(device, model, optimizer),
    }
    allocations = None
    for _ in range(5):
        step()
    if device == "cuda":
        variants["history"] = variants_of.history
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    found = paired(step, {name: variants[name] for name in variants if name in ("native", *wanted)}, rounds)
    if "profiler" in wanted:  # ending one takes far longer than a step: fewer rounds, of its own
        found["profiler"] = paired(
            step, {"native": variants_of.without, "profiler": variants_of.profiler}, max(rounds // 20, 3)
        )["profiler"]
    return {
        "mode": mode,
        "size": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "allocations_a_step": allocations,
        "variants": found,
    }


def as_markdown(results: dict[str, Any]) -> str:
    """The tables of docs/results."""
    columns = list(dict.fromkeys(name for entry in results["steps"] for name in entry["variants"] if name != "native"))
    lines = [
        f"{results['machine']}, torch {results['torch']}, Opacus {results['opacus']}, {results['rounds']} rounds\n",
        f"| step of a GPT | native | {' | '.join(columns)} |",
        f"|---|---:|{'---:|' * len(columns)}",
    ]
    for entry in results["steps"]:
        figures = entry["variants"]
        changes = (
            f"{100 * (figures[name]['median_ratio'] - 1):+.1f} ± {100 * figures[name]['standard_error']:.1f} %"
            for name in columns
        )
        label = f"{entry['size']}, {entry['parameters'] / 1e6:.3g} M parameters, {entry['mode']}"
        lines.append(f"| {label} | {figures['native']['median_ms']:.1f} ms | {' | '.join(changes)} |")
    if results["pair"]:
        lines += ["\n| an allocation and its free | in a loop, ns | over native | with cold caches, ns | over native |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for name, figures in results["pair"].items():
            lines.append(
                f"| {name} | {figures['median_ns']:.0f} | {figures['median_over_native_ns']:+.0f} "
                f"| {figures['cold_median_ns']:.0f} | {figures['cold_median_over_native_ns']:+.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="beside native; fewer leave time for more rounds, where others use the machine too",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what the hooks cost, without one"
    )
    parser.add_argument("--output", type=Path, default=Path("overhead.json"))
    arguments = parser.parse_args()
    gc.disable()
    random.seed(0)
    on_gpu = arguments.device == "cuda"
    torch.zeros(1, device=arguments.device)
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "rounds": arguments.rounds,
        "pair": measure_pairs(max(arguments.rounds // 4, 10)) if on_gpu else {},
        "steps": [],
    }
    for size in arguments.sizes:
        for mode in arguments.modes:
            results["steps"].append(measure_steps(mode, arguments.rounds, arguments.device, size, arguments.variants))
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")
            arguments.output.with_suffix(".md").write_text(as_markdown(results))
            print(f"{size} {mode}: done", flush=True)
    print(as_markdown(results))


if __name__ == "__main__":
    main()
