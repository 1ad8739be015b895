# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof diff`: what changed between two profiles."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from opacus_memprof.cli.tax import tax
from opacus_memprof.errors import MemprofError


def diff(
    before: Annotated[Path, typer.Argument(help="the profile of the run to compare with")],
    after: Annotated[
        Path | None, typer.Argument(help="the profile of the run that changed", show_default=False)
    ] = None,
    vanilla: Annotated[
        Path | None,
        typer.Option(help="The profile of the same run without privacy: what privacy costs, as `tax` prints it."),
    ] = None,
    fail_above: Annotated[
        str | None,
        typer.Option(metavar="2%|50MiB", help="Exit code 1 where a device's peak grew by more.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for a pull request, instead.")] = False,
) -> None:
    """Prints what changed at the peak and in each phase, by category and module: AFTER less BEFORE."""
    from opacus_memprof.analysis.diff import GrowthLimit, diff_profiles, exceeded_limits
    from opacus_memprof.analysis.profile import load_profile
    from opacus_memprof.reports.diff import diff_markdown, print_diff

    if vanilla is not None:
        if after is not None or fail_above is not None or markdown:
            raise MemprofError("--vanilla DIR goes with one profile and no other option: diff --vanilla DIR PRIVATE")
        tax(before, vanilla)
        return
    if after is None:
        raise MemprofError("give two profiles, BEFORE and AFTER, or --vanilla DIR and the private one")
    limit = None if fail_above is None else GrowthLimit.parse(fail_above)
    result = diff_profiles(load_profile(before), load_profile(after))
    beyond = exceeded_limits(result, limit) if limit else []
    if markdown:
        typer.echo(diff_markdown(result, beyond), nl=False)
    else:
        print_diff(result, Console(), beyond)
    if beyond:
        raise typer.Exit(1)
