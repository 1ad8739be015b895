# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof experiments`: the methods side by side, each in a fresh process, with pictures and tables."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.training_options import MethodOptions
from opacus_memprof.experiments.configuration import MODES


@with_groups
def experiments(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--experiment", metavar="|".join(MODES), help="This method only; give it again for more. All by default."
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="DIR", help="memory_profiling_results/run_TIMESTAMP by default."),
    ] = None,
    training: MethodOptions,
) -> None:
    """Train a model with every method, each in a fresh process, and draw what they need in memory and time.

    Results are written as they come. Exits with 1 where a training failed; running out of memory is a result.
    """
    base = training.configuration(default="transformer")
    from opacus_memprof.experiments import suite

    chosen = [replace(base, mode=mode) for mode in dict.fromkeys(only or MODES)]  # type: ignore[arg-type]
    chosen.sort(key=lambda one: MODES.index(one.mode))  # vanilla first, which the others are held against
    directory = output_dir or Path("memory_profiling_results") / f"run_{datetime.now():%Y%m%d_%H%M%S}"
    results = suite.run_all(chosen, directory, token=training.token)
    visualizations = directory / "visualizations"
    suite.draw(directory, visualizations)
    print((visualizations / "summary.txt").read_text(encoding="utf-8"))
    print(f"results: {directory}")
    print(f"pictures: {visualizations}")
    if any(result["status"] not in ("finished", "out_of_memory") for result in results):
        raise typer.Exit(1)
