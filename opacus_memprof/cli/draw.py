# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof draw`: the pictures of experiments, from their results alone."""

from pathlib import Path
from typing import Annotated

import typer


def draw(
    input_dir: Annotated[Path, typer.Option("--input-dir", metavar="DIR", help="With the results, *.json.")],
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", metavar="DIR", help="DIR/visualizations of the input by default.")
    ] = None,
) -> None:
    """Draw the pictures and tables of experiments again, from the JSON files of their results."""
    from opacus_memprof.experiments.presets import EXPERIMENTS
    from opacus_memprof.experiments.rows import read_rows

    rows, directory = read_rows(input_dir), output_dir or input_dir / EXPERIMENTS.outputs
    for path in (*EXPERIMENTS.write_tables(rows, directory), *EXPERIMENTS.draw(rows, directory)):
        print(path)
