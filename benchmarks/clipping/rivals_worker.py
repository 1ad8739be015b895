# SPDX-License-Identifier: Apache-2.0
"""Measures one configuration in the modes of one library.

Checks first that each clips exactly, then measures time and peak, with all modes and training without privacy
interleaved in this process. Prints one JSON object a line as results come. Under torchrun, FSDP2 shards the model.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch

from benchmarks.clipping.modes_worker import run_rounds, send
from benchmarks.clipping.rivals_bench import RivalBench
from benchmarks.clipping.rivals_exactness import exactness
from benchmarks.clipping.rivals_models import CONFIGS, SHARDED_CONFIGS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    configs = {config.name: config for config in CONFIGS + SHARDED_CONFIGS}
    parser.add_argument("config", choices=configs)
    parser.add_argument("--modes", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="do not ask who clips exactly")
    parser.add_argument("--precision", default="high")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision(arguments.precision)
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu")
    bench: type[RivalBench] = RivalBench
    if sharded := "WORLD_SIZE" in os.environ:  # not imported otherwise: forks of Opacus may not have what it needs
        from benchmarks.clipping.rivals_sharded import ShardedBench
        from opacus_memprof.experiments.training import join_group, leave_group

        bench, device = ShardedBench, join_group(device.type)
    found = configs[arguments.config]
    modes = list(arguments.modes)
    for mode in arguments.modes:
        if mode == "vanilla" or arguments.no_check:
            continue
        result = exactness(mode, found.small, device, sharded)
        send({"mode": mode, "exactness": result})
        if sharded and "failed" in result:  # a rank that stops alone would take the others' time
            modes.remove(mode)
    config = found.small if arguments.tiny else found.config
    run_rounds(bench(config, device), modes, arguments.seconds, arguments.rounds)
    if sharded:
        leave_group()


if __name__ == "__main__":
    main()
