# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof experiments`: the methods side by side, each in a fresh process, with pictures and tables."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.running_options import MethodRunningOptions
from opacus_memprof.cli.training_options import MethodOptions
from opacus_memprof.experiments.configuration import MODES


@with_groups
def experiments(
    *,
    modes: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="|".join(MODES), help="These methods only. All by default."),
    ] = None,
    training: MethodOptions,
    results_dir: Annotated[
        Path | None,
        typer.Option("--results-dir", metavar="DIR", help="memory_profiling_results/run_TIMESTAMP by default."),
    ] = None,
    running: MethodRunningOptions,
) -> None:
    """Train a model with every method, each in a fresh process, and draw what they need in memory and time.

    Results are written as they come. Exits with 1 where a training failed; running out of memory is a result.
    """
    base = training.configuration(default="transformer")
    from opacus_memprof.experiments.grid import methods
    from opacus_memprof.experiments.presets import EXPERIMENTS

    directory = results_dir or Path("memory_profiling_results") / f"run_{datetime.now():%Y%m%d_%H%M%S}"
    running.run(EXPERIMENTS, methods(base, modes or ()), directory, training.token)
