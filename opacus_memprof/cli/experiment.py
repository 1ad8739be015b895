# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof experiment`: one training run of a known configuration, in a process of its own."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.training_options import MethodOptions, Nproc
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import MODES, Mode


@with_groups
def experiment(
    *,
    mode: Annotated[
        Mode,
        typer.Option("--mode", metavar="|".join(MODES), help="vanilla: without privacy. The others: how to clip."),
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE.json", help="The result; the profile goes to FILE.run beside it.")
    ],
    training: MethodOptions,
    nproc: Nproc = 1,
) -> None:
    """Train a model for a few steps with one method, and write down time and memory.

    Exits with 1 where the training failed. Running out of memory is a result.
    """
    chosen = training.configuration(default="transformer", mode=mode, nproc=nproc)
    result = process.run_to_file(output, chosen, token=training.token, on_line=print)
    from opacus_memprof.experiments.grid import MethodCell
    from opacus_memprof.experiments.rows import Row
    from opacus_memprof.experiments.summary import terminal_summary

    row = Row(output.stem, MethodCell(chosen).label, result)
    print(terminal_summary([row], output.parent))
    print(f"result: {output}")
    if not row.finished and not row.ran_out_of_memory:
        raise typer.Exit(1)
