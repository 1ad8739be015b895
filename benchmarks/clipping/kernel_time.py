# SPDX-License-Identifier: Apache-2.0
"""What a GPU must do for a step of flash_clip and for one without privacy: the sums of its kernels' times, by kind.

    python -m benchmarks.clipping.kernel_time --output DIR

No host can make a step shorter than its kernels take, so the ratio of the sums is the floor of the ratio of the times.
The steps of both are timed in turn as well. One row is written after each configuration, so that a run that is cut
short loses nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.clipping import models, rivals_models
from benchmarks.clipping.modes_worker import Bench
from opacus_memprof.profiles.files import write_text

CONFIGS = {c.name: c for c in [*models.QUICK, *models.CONFIGS, *(rival.config for rival in rivals_models.CONFIGS)]}
DEFAULT = [
    "S2048_B8_bf16",
    "S512_B16_fp32",
    "gpt2_medium_e2e_T100_B50_fp32",
    "gpt2_small_S4096_B1_bf16",
    "vit_b16_B64_fp32",
]
KINDS = {  # the first that the name has
    "noise": r"add_normals|distribution_elementwise|normal_kernel",
    "norms": r"norms_of|squared_norms|gram|write_norm|lpnorm|norm_reduce",
    "sums and scaling": r"weighted_sum|group_gradients|token_gradients|add_products|add_rows|largest",
    "attention": r"flash|fmha|attention|sdpa",
    "convolutions": r"conv|wgrad|dgrad|fprop",
    "matrix products": r"gemm|nvjet|cutlass|splitk|gemv",
    "optimizer": r"multi_tensor|adam",
    "copies": r"memcpy|memset|copy",
}
STEPS = 3


def kernel_times(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a step's kernels and copies, by kind."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    times: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].lower()
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "elementwise and others")
            times[kind] += event["dur"] / 1000 / STEPS
    return times


def measure(config: models.Config, rounds: int) -> tuple[dict[str, dict[str, float]], dict[str, float], float]:
    """(kernels' times by mode and kind, a step's milliseconds by mode, the paired ratio)."""
    bench = Bench(config, torch.device("cuda"))
    kernels: dict[str, dict[str, float]] = {}
    seconds: dict[str, list[float]] = {"vanilla": [], "flash_clip": []}
    for number in range(rounds):
        for mode in seconds:
            step, undo = bench.wrap(mode)
            for _ in range(2):  # flash_clip proves the first, and checks the second
                bench.seconds(step)
            seconds[mode].append(min(bench.seconds(step) for _ in range(3)))
            if not number:
                for _ in range(4):  # the eighth has a check
                    step()
                kernels[mode] = kernel_times(step)
            del step
            undo()
            bench.clear()
    ratio = statistics.median(b / a for a, b in zip(seconds["vanilla"], seconds["flash_clip"], strict=True))
    return kernels, {mode: 1000 * statistics.median(times) for mode, times in seconds.items()}, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=DEFAULT, choices=CONFIGS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("."))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    arguments.output.mkdir(parents=True, exist_ok=True)
    heads = ["configuration", "vanilla's kernels", "flash_clip's", "ratio", "steps", "ratio", "what flash_clip adds"]
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---|---:|---:|---:|---:|---:|---|"]
    for name in arguments.configs:
        kernels, milliseconds, ratio = measure(CONFIGS[name], arguments.rounds)
        vanilla, private = (sum(kernels[mode].values()) for mode in ("vanilla", "flash_clip"))
        added = {kind: time - kernels["vanilla"].get(kind, 0) for kind, time in kernels["flash_clip"].items()}
        kinds = ", ".join(f"{kind} {time:+.1f}" for kind, time in sorted(added.items(), key=lambda pair: -pair[1]))
        steps = f"{milliseconds['vanilla']:.1f} → {milliseconds['flash_clip']:.1f} ms"
        cells = [
            name,
            f"{vanilla:.1f} ms",
            f"{private:.1f} ms",
            f"{private / vanilla:.3f}",
            steps,
            f"{ratio:.3f}",
            kinds,
        ]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        write_text(arguments.output / "kernel_time.md", "\n".join(lines) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
