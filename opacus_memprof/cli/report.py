# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof report`: prints the summary of a profile, and exports it to files."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from opacus_memprof.errors import MemprofError

_BY_DEFAULT = ""  # the value of an option that names no file
# As in reports.export, which loads more than a command line that does something else should.
_SUFFIXES = {
    "--html": (".html",),
    "--png": (".png",),
    "--csv": (".csv",),
    "--json": (".json",),
    "--latex": (".tex",),
    "--perfetto": (".pftrace", ".perfetto-trace"),
    "--memory-viz": (".pickle", ".pkl"),
    "--parquet": (".parquet",),
}


class ReportCommand(TyperCommand):
    """A command whose format options have an optional value: the next argument is the option's file only if it has one
    of the format's suffixes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completed = []
        for argument, following in pairwise([*args, ""]):
            suffixes = _SUFFIXES.get(argument.replace("_", "-"))
            alone = suffixes is not None and not following.endswith(suffixes)
            completed.append(f"{argument}={_BY_DEFAULT}" if alone else argument)
        return super().parse_args(ctx, completed)


def _file(option: str, help: str) -> Any:
    return typer.Option(option, metavar=f"[FILE{_SUFFIXES[option][0]}]", help=help, show_default=False)


def report(
    directory: Annotated[Path, typer.Argument(help="the directory that `opacus-memprof run` wrote")],
    html: Annotated[str | None, _file("--html", "One page: timeline, peak, modules, findings.")] = None,
    png: Annotated[str | None, _file("--png", "A picture, and the same for a dark page as FILE-dark.png.")] = None,
    csv: Annotated[str | None, _file("--csv", "Bytes by category of the peak, modules, phases, steps.")] = None,
    json: Annotated[str | None, _file("--json", "What profile.json has.")] = None,
    latex: Annotated[str | None, _file("--latex", "Tables, for booktabs.")] = None,
    perfetto: Annotated[str | None, _file("--perfetto", "A trace for ui.perfetto.dev.")] = None,
    memory_viz: Annotated[str | None, _file("--memory-viz", "A snapshot for pytorch.org/memory_viz.")] = None,
    parquet: Annotated[str | None, _file("--parquet", "Every event, for pandas, polars and duckdb.")] = None,
    vanilla: Annotated[
        Path | None, typer.Option(help="The profile of the same training without Opacus: --html shows what DP costs.")
    ] = None,
) -> None:
    """Prints where the memory went, from a profile's directory; a killed process' profile is read from its events.

    Each option writes a file: the one that follows it, or memprof.html, memprof.png … in DIRECTORY. Of a job of several
    ranks, DIRECTORY shows all of them, and DIRECTORY/rank_0 one.
    """
    from opacus_memprof.analysis.job_view import JobView, load_view
    from opacus_memprof.reports.text import print_report

    given = {"html": html, "png": png, "csv": csv, "json": json, "latex": latex, "perfetto": perfetto}
    given |= {"memory_viz": memory_viz, "parquet": parquet}
    wanted = {name: file or None for name, file in given.items() if file is not None}
    if vanilla and html is None:
        raise MemprofError("--vanilla is for the page: add --html")
    view = load_view(directory, vanilla, whole="html" in wanted)
    if isinstance(view, JobView) and (wanted.keys() - {"html"} or vanilla):
        raise MemprofError(
            f"{directory} holds the {len(view.summary.ranks)} ranks of a job, and there is a page of them alone: use "
            f"--html, or give one, as {directory / 'rank_0'}"
        )
    console = Console()
    print_report(view, console)
    if wanted:
        from opacus_memprof.reports.export import export

        console.print()
        for path in export(view, wanted):
            console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
