# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof report`: the summary of a profile that is there already."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    directory: Annotated[Path, typer.Argument(help="the directory that `opacus-memprof run` wrote")],
) -> None:
    """Prints where the memory went, from a profile's directory; a killed process' profile is read from its events.

    Of a job of several ranks, DIR shows all of them, and DIR/rank_0 one.
    """
    from opacus_memprof.analysis.profile import load_profile  # loads torch, which other commands must not
    from opacus_memprof.analysis.ranks import load_ranks
    from opacus_memprof.directory import rank_directories
    from opacus_memprof.reports.ranks import print_ranks
    from opacus_memprof.reports.text import print_summary

    if rank_directories(directory):
        print_ranks(load_ranks(directory), Console())
    else:
        print_summary(load_profile(directory), Console())
