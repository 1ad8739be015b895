# SPDX-License-Identifier: Apache-2.0
"""Prints the first lines of reports in a terminal (status, versions) and the last ones (warnings)."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from opacus_memprof.analysis.virtual import Virtual, virtual_mark
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.profile import Profile

_STYLE = {"finished": "green", "running": "cyan"}


def status_markup(profile: Profile | JobSummary) -> str:
    """The status of a profile or a job, as markup in its colour."""
    status = profile.status
    return f"[{_STYLE.get(status, 'red')}]{escape(status.replace('_', ' '))}[/]"


def print_header(title: str, profile: Profile | JobSummary, console: Console) -> None:
    """Prints the first lines of a report. `title` is markup."""
    console.print(f"[bold]opacus-memprof[/]  {title}", highlight=False)
    print_virtual_mark(profile.virtual, console)
    versions = profile.versions
    if known := [f"{name} {versions[name]}" for name in ("torch", "opacus", "cuda") if versions.get(name)]:
        console.print(escape(", ".join(known)), style="dim", highlight=False)


def print_virtual_mark(virtual: Virtual, console: Console) -> None:
    """Prints the name of the virtual GPU, if the run was on one."""
    if mark := virtual_mark(virtual):
        console.print(f"[bold magenta]{escape(mark)}[/]", highlight=False)


def print_warnings(warnings: Sequence[str], console: Console) -> None:
    """Prints an empty line and the warnings."""
    if warnings:
        console.print()
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
