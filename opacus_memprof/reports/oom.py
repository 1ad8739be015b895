# SPDX-License-Identifier: Apache-2.0
"""Shows an oom_report.json: in a terminal, as a page, and as the note of an exception."""

from msgspec import UNSET
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from opacus_memprof.analysis.profile_view import unattributed_parts
from opacus_memprof.analysis.verdict_view import failure_moment, select_suggestions
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.oom_report import LeftBehind, OomReport, SuggestedChange
from opacus_memprof.profiles.profile import virtual_mark
from opacus_memprof.profiles.units import format_bytes, format_count
from opacus_memprof.reports.html import build_page
from opacus_memprof.reports.text import print_indented, print_unattributed, table_of

_TOP = 8
_TOP_SUGGESTIONS = 4
_SCRIPTS = ["base.js", "data.js", "theme.js", "table.js", "frame.js", "verdict.js", "suggestions.js", "oom.js"]


def print_oom(report: OomReport, console: Console) -> None:
    """Prints the report of a failed allocation."""
    console.print(f"[bold red]{tr('out of memory')}[/] {escape(headline(report))}", highlight=False)
    if mark := virtual_mark(report.virtual):
        console.print(f"[bold magenta]{escape(tr_sentence(mark))}[/]", highlight=False)
    print_indented(_describe_room(report), console, "  ", "  ", style="dim")
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
    what = tr_sentence(request.category.replace("_", " "))
    return tr(
        "{device}: {size} of {what} {moment}, with {live} live",
        device=report.device,
        size=format_bytes(request.bytes),
        what=(tr("{what} of {module}", what=what, module=request.module) if request.module else what)
        + (f" ({request.op})" if request.op else ""),
        moment=tr_sentence(failure_moment(report)),
        live=format_bytes(report.live_bytes),
    )


def exception_note(report: OomReport, path: str) -> str:
    """Formats the note on the exception of the failed allocation; `path` is the path of the report."""
    largest = list(report.holders.categories.items())[:3]
    lines = [f"opacus-memprof: {headline(report)}"]
    if mark := virtual_mark(report.virtual):
        lines.append(tr_sentence(mark))
    if largest:
        held = [f"{tr_sentence(name.replace('_', ' '))} {format_bytes(size)}" for name, size in largest]
        lines.append(tr("held by {categories}", categories=", ".join(held)))
    if report.suggestions:
        first = report.suggestions[0]
        title, size = tr_sentence(first.title), format_bytes(first.predicted_peak_bytes)
        lines.append(tr("suggestion: {title} (predicted peak {size}{fits})", title=title, size=size, fits=""))
    return "\n  ".join([*lines, tr("report: {path}", path=path)])


def _describe_room(report: OomReport) -> str:
    room, needed = report.room, report.needed
    if report.batch.samples is None:
        parts = [tr("That is {size} in all", size=format_bytes(needed.bytes))]
    else:
        where = tr_sentence(needed.phase.replace("_", " "))
        where = tr("{phase} of {module}", phase=where, module=needed.module) if needed.module else where
        parts = [tr("The step needs {size}, in {where}", size=format_bytes(needed.bytes), where=where)]
    if room.may_reserve_bytes is None:
        if room.limit_bytes is not None:
            parts.append(tr("{size} are allowed", size=format_bytes(room.limit_bytes)))
    else:  # then all of them are known
        largest = max(room.largest_free_bytes or 0, room.unreserved_bytes or 0)
        parts.append(tr("this process may reserve {size}", size=format_bytes(room.may_reserve_bytes)))
        parts.append(tr("{size} of it were free in fragments", size=format_bytes(room.cached_bytes or 0)))
        parts.append(tr("the largest block was {size}", size=format_bytes(largest)))
        given_back = format_bytes(room.free_segments_bytes or 0)
        parts.append(tr("empty_cache would have given back {size}", size=given_back))
        others, device = format_bytes(room.others_bytes or 0), format_bytes(room.device_bytes or 0)
        parts.append(tr("others use {size} of the device's {device}", size=others, device=device))
    batch = report.batch
    if batch.samples and batch.bytes_per_sample is not None:
        slope = format_bytes(batch.bytes_per_sample)
        fitting = batch.largest_that_fits
        fits = tr("{count} at a time would fit", count=fitting) if fitting else tr("not even one at a time would fit")
        one = tr("a node") if batch.unit == "node" else tr("a sample")
        takes = tr(
            "{one} takes {size} at the peak: of {count}, {fits}", one=one, size=slope, count=batch.samples, fits=fits
        )
        parts.append(takes)
    return tr("{sentences}.", sentences=tr("; ").join(parts))


def _print_holders(report: OomReport, console: Console) -> None:
    holders = report.holders
    categories = table_of(tr("held by category"), (tr("bytes"),), ())
    for name, size in list(holders.categories.items())[:_TOP]:
        categories.add_row(escape(name), format_bytes(size))
    console.print()
    console.print(categories)
    table = table_of(tr("module"), (tr("bytes"),), (tr("category"), tr("made in"), tr("blocks")))
    for group in holders.largest[:_TOP]:
        ago = tr("{steps} ago", steps=tr_sentence(format_count(group.age, "step")))
        made = f"{tr_sentence(group.phase.replace('_', ' '))}, {ago if group.age else tr('this step')}"
        module, category = escape(group.module or tr("(no module)")), escape(group.category)
        table.add_row(module, format_bytes(group.bytes), category, made, str(group.blocks))
    console.print()
    console.print(table)
    print_unattributed(unattributed_parts(holders.categories, holders.unattributed, report.live_bytes), console)


def _print_leftovers(leftovers: LeftBehind, console: Console) -> None:
    if leftovers.bytes:
        what = tr("forwards without a backward")
        if not leftovers.captures:
            what = tr("steps {first} to {last}", first=leftovers.steps[0], last=leftovers.steps[-1])
        said = tr("{size} were left behind by {what}", size=format_bytes(leftovers.bytes), what=what)
        console.print(f"\n[yellow]{said}[/]", highlight=False)


def _describe_trial(suggestion: SuggestedChange) -> str:
    trial = suggestion.tried
    if trial is UNSET:
        return ""
    if trial.error:
        return tr(", tried: failed with {error}", error=trial.error)
    peak = "" if trial.peak_bytes is None else tr(", peak {size}", size=format_bytes(trial.peak_bytes))
    return tr(", tried: {fits}{peak}", fits=tr_sentence("fits" if trial.fits else "too large"), peak=peak)


def _print_suggestions(report: OomReport, console: Console) -> None:
    shown = select_suggestions(report.suggestions)[:_TOP_SUGGESTIONS]
    if not shown:
        console.print("\n" + tr_sentence("No known change would make it fit."))
    for number, suggestion in enumerate(shown, 1):
        fits = {True: f"[green]{tr('fits')}[/]", False: f"[yellow]{tr('not enough alone')}[/]", None: ""}[
            suggestion.fits
        ]
        fits = f"[yellow]{tr_sentence('fits tightly')}[/]" if suggestion.is_tight else fits
        sizes = tr(
            "peak {peak}, {saved} less",
            peak=format_bytes(suggestion.predicted_peak_bytes),
            saved=format_bytes(suggestion.saved_bytes),
        )
        console.print(
            f"\n[bold]{number}. {escape(tr_sentence(suggestion.title))}[/]: "
            f"{sizes} {fits}{escape(_describe_trial(suggestion))}",
            highlight=False,
        )
        console.print(Padding(escape(suggestion.code), (0, 0, 0, 3)), style="cyan", highlight=False)
        print_indented(tr_sentence(suggestion.computed), console, style="dim")
