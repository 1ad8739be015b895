# SPDX-License-Identifier: Apache-2.0
"""Shows an oom_report.json: in a terminal, as a page, and as the note of an exception."""

from msgspec import UNSET
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from opacus_memprof.analysis.profile_view import unattributed_parts
from opacus_memprof.analysis.verdict_view import failure_moment, select_suggestions
from opacus_memprof.profiles.oom_report import LeftBehind, OomReport, SuggestedChange
from opacus_memprof.profiles.profile import virtual_mark
from opacus_memprof.profiles.units import format_bytes, format_count
from opacus_memprof.reports.html import build_page
from opacus_memprof.reports.text import print_unattributed, table_of

_TOP = 8
_TOP_SUGGESTIONS = 4
_SCRIPTS = ["base.js", "data.js", "theme.js", "table.js", "frame.js", "verdict.js", "suggestions.js", "oom.js"]


def print_oom(report: OomReport, console: Console) -> None:
    """Prints the report of a failed allocation."""
    console.print(f"[bold red]out of memory[/] {escape(headline(report))}", highlight=False)
    if mark := virtual_mark(report.virtual):
        console.print(f"[bold magenta]{escape(mark)}[/]", highlight=False)
    console.print(f"  {escape(_describe_room(report))}", style="dim", highlight=False)
    _print_holders(report, console)
    _print_leftovers(report.left_behind, console)
    _print_suggestions(report, console)


def build_oom_page(report: OomReport) -> str:
    """Builds the HTML page of a failed allocation."""
    categories = {*report.holders.categories, *report.needed.parts}
    content = {"headline": headline(report), "failure": report, "virtual_mark": virtual_mark(report.virtual)}
    return build_page("out of memory", _SCRIPTS, content, categories, fallback="oom_report.txt")


def headline(report: OomReport) -> str:
    """Describes the failed allocation and the live bytes in a sentence."""
    request = report.request
    what = request.category.replace("_", " ")
    module = f" of {request.module}" if request.module else ""
    op = f" ({request.op})" if request.op else ""
    return (
        f"{report.device}: {format_bytes(request.bytes)} of {what}{module}{op} {failure_moment(report)}, with "
        f"{format_bytes(report.live_bytes)} live"
    )


def exception_note(report: OomReport, path: str) -> str:
    """Formats the note on the exception of the failed allocation; `path` is the path of the report."""
    largest = list(report.holders.categories.items())[:3]
    lines = [f"opacus-memprof: {headline(report)}"]
    if mark := virtual_mark(report.virtual):
        lines.append(mark)
    if largest:
        lines.append("held by " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest))
    if report.suggestions:
        first = report.suggestions[0]
        lines.append(f"suggestion: {first.title} (predicted peak {format_bytes(first.predicted_peak_bytes)})")
    return "\n  ".join([*lines, f"report: {path}"])


def _describe_room(report: OomReport) -> str:
    room, needed = report.room, report.needed
    if report.batch.samples is None:
        parts = [f"That is {format_bytes(needed.bytes)} in all"]
    else:
        where = f" of {needed.module}" if needed.module else ""
        parts = [f"The step needs {format_bytes(needed.bytes)}, in {needed.phase.replace('_', ' ')}{where}"]
    if room.may_reserve_bytes is None:
        if room.limit_bytes is not None:
            parts.append(f"{format_bytes(room.limit_bytes)} are allowed")
    else:  # then all of them are known
        largest = max(room.largest_free_bytes or 0, room.unreserved_bytes or 0)
        parts.append(f"this process may reserve {format_bytes(room.may_reserve_bytes)}")
        parts.append(f"{format_bytes(room.cached_bytes or 0)} of it were free in fragments")
        parts.append(f"the largest block was {format_bytes(largest)}")
        parts.append(f"empty_cache would have given back {format_bytes(room.free_segments_bytes or 0)}")
        others, device = room.others_bytes or 0, room.device_bytes or 0
        parts.append(f"others use {format_bytes(others)} of the device's {format_bytes(device)}")
    batch = report.batch
    if batch.samples and batch.bytes_per_sample is not None:
        slope = format_bytes(batch.bytes_per_sample)
        fitting = batch.largest_that_fits
        fits = f"{fitting} at a time would fit" if fitting else "not even one at a time would fit"
        parts.append(f"a sample takes {slope} at the peak: of {batch.samples}, {fits}")
    return "; ".join(parts) + "."


def _print_holders(report: OomReport, console: Console) -> None:
    holders = report.holders
    categories = table_of("held by category", ("bytes",), ())
    for name, size in list(holders.categories.items())[:_TOP]:
        categories.add_row(escape(name), format_bytes(size))
    console.print()
    console.print(categories)
    table = table_of("module", ("bytes",), ("category", "made in", "blocks"))
    for group in holders.largest[:_TOP]:
        age = "this step" if group.age == 0 else f"{format_count(group.age, 'step')} ago"
        made = f"{group.phase.replace('_', ' ')}, {age}"
        module, category = escape(group.module or "(no module)"), escape(group.category)
        table.add_row(module, format_bytes(group.bytes), category, made, str(group.blocks))
    console.print()
    console.print(table)
    print_unattributed(unattributed_parts(holders.categories, holders.unattributed, report.live_bytes), console)


def _print_leftovers(leftovers: LeftBehind, console: Console) -> None:
    if leftovers.bytes:
        what = (
            "forwards without a backward"
            if leftovers.captures
            else f"steps {leftovers.steps[0]} to {leftovers.steps[-1]}"
        )
        console.print(f"\n[yellow]{format_bytes(leftovers.bytes)} were left behind by {what}[/]", highlight=False)


def _describe_trial(suggestion: SuggestedChange) -> str:
    trial = suggestion.tried
    if trial is UNSET:
        return ""
    if trial.error:
        return f", tried: failed with {trial.error}"
    peak = "" if trial.peak_bytes is None else f", peak {format_bytes(trial.peak_bytes)}"
    return f", tried: {'fits' if trial.fits else 'too large'}{peak}"


def _print_suggestions(report: OomReport, console: Console) -> None:
    shown = select_suggestions(report.suggestions)[:_TOP_SUGGESTIONS]
    if not shown:
        console.print("\nNo known change would make it fit.")
    for number, suggestion in enumerate(shown, 1):
        fits = {True: "[green]fits[/]", False: "[yellow]not enough alone[/]", None: ""}[suggestion.fits]
        fits = "[yellow]fits tightly[/]" if suggestion.is_tight else fits
        console.print(
            f"\n[bold]{number}. {escape(suggestion.title)}[/]: "
            f"peak {format_bytes(suggestion.predicted_peak_bytes)}, "
            f"{format_bytes(suggestion.saved_bytes)} less {fits}{escape(_describe_trial(suggestion))}",
            highlight=False,
        )
        console.print(Padding(escape(suggestion.code), (0, 0, 0, 3)), style="cyan", highlight=False)
        console.print(Padding(escape(suggestion.computed), (0, 0, 0, 3)), style="dim", highlight=False)
