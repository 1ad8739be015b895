# SPDX-License-Identifier: Apache-2.0
"""Prints what programs do: ``python -m tests.exactness.table [words of names]``.

Counts by outcome, and one line for each program whose outcome is not allowed (``--all``: for each program).
"""

import argparse
import importlib
import time
from collections import Counter

import torch

from tests.exactness.program import Program
from tests.exactness.programs import PROGRAMS


def _architectures() -> dict[str, Program]:
    """The architectures as programs. Importing them takes seconds."""
    architectures = importlib.import_module("tests.exactness.architectures").ARCHITECTURES
    return {name: each.program(name) for name, each in architectures.items()}


def main() -> int:
    """Runs the chosen programs. Returns the number of those whose outcome is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run programs whose name contains any of these")
    parser.add_argument(
        "--architectures", action="store_true", help="run architectures of transformers and torchvision"
    )
    parser.add_argument("--all", action="store_true", help="print a line for each program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failed = 0
    for name, program in (_architectures() if arguments.architectures else PROGRAMS).items():
        if arguments.words and not any(word in name for word in arguments.words):
            continue
        start = time.perf_counter()
        verdict = program.verdict()
        counts[verdict.outcome] += 1
        is_allowed = program.accepts(verdict)
        failed += not is_allowed
        if arguments.all or not is_allowed:
            seconds = time.perf_counter() - start
            message = " ".join(verdict.message.split())[:160]
            mark = " " if is_allowed else "!"
            print(
                f"{mark} {name:36} {verdict.outcome:8} allowed {program.allowed:8} step {verdict.at} "
                f"error {verdict.error:8.2g} {seconds:5.2f} s  {message}",
                flush=True,
            )
    print(", ".join(f"{counts[each]} {each}" for each in ("exact", "refused", "wrong", "crash")))
    print(f"{failed} of {sum(counts.values())} have an outcome that is not allowed")
    return failed


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
