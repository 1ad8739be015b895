# SPDX-License-Identifier: Apache-2.0
"""The program of benchmarks/planning/accuracy.py: two steps of a model, with a limit on what torch may reserve.

python -m benchmarks.planning.case --model gpt --mode ghost --batch-size 8 --limit 3221225472
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a program that is run as a file
from benchmarks.virtual_gpu.cases import Case
from benchmarks.virtual_gpu.training import train


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True, help="bytes that torch may reserve")
    args = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(args.limit / torch.cuda.get_device_properties(device).total_memory)
    case = Case(args.model, args.model, args.mode, args.batch_size, steps=2)
    train(case, device, None)  # type: ignore[arg-type]  # of a training without privacy alone


if __name__ == "__main__":
    main(sys.argv[1:])
