# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of flash_clip beside training without privacy and Opacus' own modes.

    python -m benchmarks.clipping.modes                      # every configuration, at most eight minutes
    python -m benchmarks.clipping.modes --quick              # tiny models on the CPU: does everything run?
    python -m benchmarks.clipping.modes --configs S512_B16_fp32 --modes vanilla flash_clip
    python -m benchmarks.clipping.modes --isolate            # every mode in a process of its own (for the peaks)

Each configuration runs in its own process, with all modes interleaved (see modes_worker.py); ratios are taken
within a round against vanilla, and their median is quoted. The bytes that the norm step moves are counted from the
shapes by opacus_memprof.clipping.cost; memory_traffic.py checks them with Nsight Compute. Results are written after
every configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.clipping.memory_traffic import counted_bytes
from benchmarks.clipping.models import CONFIGS, QUICK, Config
from benchmarks.clipping.modes_worker import MODES
from benchmarks.clipping.training_modes import OPACUS
from opacus_memprof.profiles.files import write_text

SHARE = {"S16384_B1_fp32": 3.0, "S16384_B1_bf16": 1.2}  # of the time, for the longer configurations
GIB = 1 << 30


def run_worker(
    command: list[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[list[dict[str, Any]]], None] = lambda lines: None,
) -> tuple[list[dict[str, Any]], str]:
    """(the lines that a worker printed until it ended, failed or its time was over; "" or how it failed).

    ``on_line`` gets the lines so far after each.
    """
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, **(environment or {})}
    lines: list[dict[str, Any]] = []
    is_over = threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:

            def end() -> None:
                is_over.set()
                process.terminate()  # torchrun ends its processes

            clock = threading.Timer(2 * seconds + 60, end)
            clock.start()
            assert process.stdout is not None
            for line in map(str.strip, process.stdout):
                if line.startswith("{") and line.endswith("}"):
                    lines.append(json.loads(line))
                    on_line(lines)
            process.wait()
            clock.cancel()
        failed = f"the worker ended with status {process.returncode}" if process.returncode else ""
        failed = "its time was over" if is_over.is_set() else failed
        errors.seek(0)
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
    if failed and said:
        print("\n".join(said), file=sys.stderr)
        raised = [line for line in said if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)(: |$)", line)]
        failed += f": {(raised or said)[-1][:200]}"  # torchrun says more after it
    return lines, failed


def run_config(config: Config, modes: list[str], seconds: float, precision: str) -> list[dict[str, Any]]:
    """Returns the worker's lines, up to its failure or timeout."""
    command = [sys.executable, "-m", "benchmarks.clipping.modes_worker", config.name]
    command += ["--seconds", str(seconds), "--precision", precision, "--modes", *modes]
    lines, failed = run_worker(command, seconds)
    if failed:
        print(f"{config.name}: {failed}", file=sys.stderr)
    return lines


def summarize(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By mode: median seconds, peak, and medians of the ratios to the same round's vanilla."""
    vanilla = {line["round"]: line for line in lines if line["mode"] == "vanilla" and "seconds" in line}
    summary: dict[str, dict[str, Any]] = {}
    for mode in dict.fromkeys(line["mode"] for line in lines):
        mine = [line for line in lines if line["mode"] == mode]
        failed = next((line["failed"] for line in mine if "failed" in line), None)
        mine = [line for line in mine if "seconds" in line]
        if not mine:
            summary[mode] = {"failed": failed}
            continue
        paired = [(line, vanilla[line["round"]]) for line in mine if line["round"] in vanilla]
        peaks = [line["peak_bytes"] for line in mine]
        base = max((v["peak_bytes"] or 0 for v in vanilla.values()), default=0)
        summary[mode] = {
            "rounds": len(mine),
            "seconds": statistics.median(line["seconds"] for line in mine),
            "time_ratio": statistics.median(a["seconds"] / b["seconds"] for a, b in paired) if paired else None,
            "time_ratios": [a["seconds"] / b["seconds"] for a, b in paired],
            "peak_bytes": max(peaks) if peaks[0] is not None else None,
            "peak_ratio": max(peaks) / base if base and peaks[0] is not None else None,
            "before_bytes": sorted({line["before_bytes"] for line in mine} - {None}),
            "failed": failed,
        }
    return summary


def table(name: str, summary: dict[str, dict[str, Any]], moved: dict[str, int]) -> str:
    head = f"{'mode':<18}{'ms':>10}{'x vanilla':>11}{'peak GiB':>10}{'x vanilla':>11}  rounds"
    rows = [f"\n{name}: norm step moves {moved['flash_clip'] / 1e9:.2f} GB (ghost {moved['ghost'] / 1e9:.1f} GB)", head]
    for mode in sorted(summary, key=MODES.index):
        found = summary[mode]
        if "seconds" not in found:
            rows.append(f"{mode:<18}  {found['failed']}")
            continue
        peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / GIB:.2f}"
        ratios = [("-" if found[key] is None else f"{found[key]:.3f}") for key in ("time_ratio", "peak_ratio")]
        rows.append(
            f"{mode:<18}{1e3 * found['seconds']:>10.1f}{ratios[0]:>11}{peak:>10}{ratios[1]:>11}  {found['rounds']}"
            + (f"  then {found['failed']}" if found["failed"] else "")
        )
    return "\n".join(rows)


def machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--isolate", action="store_true", help="each mode in a process of its own")
    parser.add_argument("--configs", nargs="+", help="names of configurations")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["vanilla", *OPACUS])
    parser.add_argument("--seconds", type=float, default=420, help="for everything, starting processes included")
    parser.add_argument("--precision", default="high", help="of float32 products: high (TF32) or highest")
    parser.add_argument("-o", "--output", type=Path, default=Path("clipping.json"))
    arguments = parser.parse_args()
    known = QUICK if arguments.quick else CONFIGS
    configs = [c for c in known if not arguments.configs or c.name in arguments.configs]
    if not configs:
        parser.error(f"no such configuration; there are {', '.join(c.name for c in known)}")
    results: dict[str, Any] = {"machine": machine(), "float32_matmul_precision": arguments.precision, "configs": {}}
    end = time.monotonic() + (30 * len(configs) if arguments.quick else arguments.seconds)
    for i, config in enumerate(configs):
        shares = [SHARE.get(c.name, 1.0) for c in configs[i:]]
        seconds = max(5.0, (end - time.monotonic()) * shares[0] / sum(shares) - 15)
        lines: list[dict[str, Any]] = []
        together = [[mode] for mode in arguments.modes] if arguments.isolate else [arguments.modes]
        for modes in together:
            lines += run_config(config, modes, seconds / len(together), arguments.precision)
        try:
            moved = counted_bytes(config)
        except ImportError as missing:
            print(f"{config.name}: {missing}", file=sys.stderr)
            continue
        summary = summarize(lines)
        results["configs"][config.name] = {"modes": summary, "norm_step_bytes": moved, "rounds": lines}
        write_text(arguments.output, json.dumps(results, indent=1))
        print(table(config.name, summary, moved), flush=True)


if __name__ == "__main__":
    main()
