# SPDX-License-Identifier: Apache-2.0
"""Runs short benchmarks that need no GPU and says which got slower than the committed ratios.

    python -m benchmarks.compare            # all of them: two minutes; fails if one got slower
    python -m benchmarks.compare stream     # those whose command has one of these words
    python -m benchmarks.compare --write    # replaces the ratios that are committed (benchmarks/ratios.json)

A ratio compares two halves of one run: with what is measured, and without. So machines compare, if not closely: the
tolerance covers that. A ratio beyond it is measured a second time, and the smaller one counts.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMMITTED = Path(__file__).with_name("ratios.json")


@dataclass(frozen=True)
class Benchmark:
    """A command, and where its output has ratios.

    Attributes:
        command: a module of this folder and its arguments.
        patterns: regular expressions of output, by name; the group is the ratio, or the percent that are added.
    """

    command: str
    patterns: Mapping[str, str]

    def ratios_in(self, output: str) -> dict[str, float]:
        """Returns the ratios by name."""
        found = {}
        for name, pattern in self.patterns.items():
            match = re.search(pattern, output, re.MULTILINE)
            if match is None:
                raise SystemExit(f"{self.command} did not print {name}:\n{output}")
            number = float(match[1])
            found[name] = 1 + number / 100 if match[0].endswith("%") else number
        return found

    def run(self) -> dict[str, float]:
        """Runs the command. Returns its ratios by name."""
        command = [sys.executable, "-W", "ignore", "-m", *f"benchmarks.{self.command}".split()]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        if done.returncode:
            raise SystemExit(f"{self.command} failed:\n{done.stdout}{done.stderr}")
        return self.ratios_in(done.stdout)


BENCHMARKS = (
    Benchmark(
        "clipping.host_time --layers 8 --rounds 30", {"a step of flash_clip": r"^flash_clip.*?([\d.]+) x vanilla"}
    ),
    Benchmark(
        "clipping.proof_cost --width 64 --layers 4 --tokens 32 --batch 8 --vocabulary 256 --rounds 30",
        {"a step with its net": r'"net, ratio": ([\d.]+)', "1000 steps with checks": r'"checks in .*": ([\d.]+)'},
    ),
    Benchmark("profiling.stream --rounds 20 --seconds 0.3", {"a streamed step": r"^a step.*?: ([+-][\d.]+) %"}),
    Benchmark("profiling.pytest_plugin --rounds 20", {"a profiled test": r"profiled: ([+-][\d.]+) %"}),
)


def slower(found: Mapping[str, float], committed: Mapping[str, float], tolerance: float) -> list[str]:
    """Returns the names of ratios beyond what is committed; a name that is not committed is none of them."""
    return [name for name, ratio in found.items() if ratio > committed.get(name, ratio) * (1 + tolerance)]


def main() -> int:
    """Runs the benchmarks. Returns 0 if none got slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run benchmarks whose command has one of these words")
    parser.add_argument("--write", action="store_true", help="commit the ratios instead of comparing with them")
    arguments = parser.parse_args()
    known: dict[str, Any] = json.loads(COMMITTED.read_text())
    committed = known["ratios"]
    print(f"{'ratio':>7} {'before':>7}", flush=True)
    late: list[str] = []
    for benchmark in BENCHMARKS:
        if arguments.words and not any(word in benchmark.command for word in arguments.words):
            continue
        found = benchmark.run()
        if not arguments.write and slower(found, committed, known["tolerance"]):
            found = {name: min(found[name], ratio) for name, ratio in benchmark.run().items()}
        beyond = [] if arguments.write else slower(found, committed, known["tolerance"])
        for name, ratio in found.items():
            before = f"{committed[name]:.2f}" if name in committed else "-"
            verdict = f"  SLOWER by more than {100 * known['tolerance']:.0f} %" if name in beyond else ""
            print(f"{ratio:7.2f} {before:>7}  {name} ({benchmark.command.split()[0]}){verdict}", flush=True)
        late += beyond
        if arguments.write:
            committed |= {name: round(ratio, 3) for name, ratio in found.items()}
    if arguments.write:
        known["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        COMMITTED.write_text(json.dumps(known, indent=1) + "\n")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
