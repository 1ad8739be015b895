# SPDX-License-Identifier: Apache-2.0
"""oom_report.json for a terminal, and as the few lines of a note."""

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from opacus_memprof.analysis.virtual import virtual_mark
from opacus_memprof.profiles.oom_report import LeftBehind, OomReport, SuggestedChange
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.head import print_virtual_mark
from opacus_memprof.reports.moments import when

_TOP = 8
_TOP_SUGGESTIONS = 4


def print_oom(report: OomReport, console: Console) -> None:
    """Prints what analysis.oom.build_report returned."""
    console.print(f"[bold red]out of memory[/] {escape(headline(report))}", highlight=False)
    print_virtual_mark(report.virtual, console)
    console.print(f"  {escape(_what_would_have_fitted(report))}", style="dim", highlight=False)
    _print_holders(report, console)
    _print_left(report.left_behind, console)
    _print_suggestions(report, console)


def headline(report: OomReport) -> str:
    """What was asked for, and what was live, in one sentence."""
    request = report.request
    what = request.category.replace("_", " ")
    module = f" of {request.module}" if request.module else ""
    op = f" ({request.op})" if request.op else ""
    moment = when(request.phase, request.step, request.logical_step)
    return (
        f"{report.device}: {format_bytes(request.bytes)} of {what}{module}{op} in {moment}, with "
        f"{format_bytes(report.live_bytes)} live"
    )


def note(report: OomReport, path: str) -> str:
    """The lines that an exception carries."""
    held = list(report.holders.categories.items())[:3]
    lines = [f"opacus-memprof: {headline(report)}"]
    if mark := virtual_mark(report.virtual):
        lines.append(mark)
    if held:
        lines.append("held by " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in held))
    if report.suggestions:
        first = report.suggestions[0]
        lines.append(f"suggestion: {first.title} (predicted peak {format_bytes(first.predicted_peak_bytes)})")
    return "\n  ".join([*lines, f"report: {path}"])


def _what_would_have_fitted(report: OomReport) -> str:
    room, needed = report.room, report.needed
    if report.batch.samples is None:
        said = [f"That is {format_bytes(needed.bytes)} in all"]
    else:
        where = f" of {needed.module}" if needed.module else ""
        said = [f"The step needs {format_bytes(needed.bytes)}, in {needed.phase.replace('_', ' ')}{where}"]
    if room.may_reserve_bytes is None:
        if room.limit_bytes is not None:
            said.append(f"{format_bytes(room.limit_bytes)} are allowed")
    else:  # then all of them are known
        largest = max(room.largest_free_bytes or 0, room.unreserved_bytes or 0)
        said.append(f"this process may reserve {format_bytes(room.may_reserve_bytes)}")
        said.append(f"{format_bytes(room.cached_bytes or 0)} of it were free in fragments")
        said.append(f"the largest block was {format_bytes(largest)}")
        said.append(f"empty_cache would have given back {format_bytes(room.free_segments_bytes or 0)}")
        others, device = room.others_bytes or 0, room.device_bytes or 0
        said.append(f"others use {format_bytes(others)} of the device's {format_bytes(device)}")
    batch = report.batch
    if batch.samples and batch.bytes_per_sample is not None:
        slope = format_bytes(batch.bytes_per_sample)
        fitting = batch.largest_that_fits
        fits = f"{fitting} at a time would fit" if fitting else "not even one at a time would fit"
        said.append(f"a sample takes {slope} at the peak: of {batch.samples}, {fits}")
    return "; ".join(said) + "."


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(columns[0], overflow="ellipsis", no_wrap=True)
    table.add_column(columns[1], justify="right", no_wrap=True)
    for column in columns[2:]:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _print_holders(report: OomReport, console: Console) -> None:
    holders = report.holders
    categories = _table("held by category", "bytes")
    for name, size in list(holders.categories.items())[:_TOP]:
        categories.add_row(escape(name), format_bytes(size))
    console.print()
    console.print(categories)
    table = _table("module", "bytes", "category", "made in", "blocks")
    for one in holders.largest[:_TOP]:
        age = "this step" if one.age == 0 else f"{one.age} step{'s' if one.age > 1 else ''} ago"
        made = f"{one.phase.replace('_', ' ')}, {age}"
        table.add_row(
            escape(one.module or "(no module)"), format_bytes(one.bytes), escape(one.category), made,
            str(one.blocks),
        )  # fmt: skip
    console.print()
    console.print(table)


def _print_left(left: LeftBehind, console: Console) -> None:
    if left.bytes:
        what = "forwards without a backward" if left.captures else f"steps {left.steps[0]} to {left.steps[-1]}"
        console.print(f"\n[yellow]{format_bytes(left.bytes)} were left behind by {what}[/]", highlight=False)


def _worth_showing(suggestions: list[SuggestedChange]) -> list[SuggestedChange]:
    """Those that fit, the first few of them; where none does, those that save the most."""
    fitting = [one for one in suggestions if one.fits is not False]
    return (fitting or suggestions)[:_TOP_SUGGESTIONS]


def _print_suggestions(report: OomReport, console: Console) -> None:
    shown = _worth_showing(report.suggestions)
    if not shown:
        console.print("\nNothing is known that would make it fit.")
    for index, one in enumerate(shown):
        fits = {True: "[green]fits[/]", False: "[yellow]not enough alone[/]", None: ""}[one.fits]
        console.print(
            f"\n[bold]{index + 1}. {escape(one.title)}[/]: peak {format_bytes(one.predicted_peak_bytes)}, "
            f"{format_bytes(one.saved_bytes)} less {fits}",
            highlight=False,
        )
        console.print(Padding(escape(one.code), (0, 0, 0, 3)), style="cyan", highlight=False)
        console.print(Padding(escape(one.computed), (0, 0, 0, 3)), style="dim", highlight=False)
