# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof tax`: a private run's profile against that of the same run without privacy."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def tax(
    private: Annotated[Path, typer.Argument(help="the profile of the training with Opacus")],
    vanilla: Annotated[Path, typer.Argument(help="the profile of the same model and batch without it")],
) -> None:
    """Prints what privacy costs at the peak: the difference of two profiles, by category and module."""
    from opacus_memprof.analysis.profile import load_profile
    from opacus_memprof.analysis.tax import dp_tax
    from opacus_memprof.reports.tax import print_tax

    print_tax(dp_tax(load_profile(private), load_profile(vanilla)), Console())
