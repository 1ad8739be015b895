# SPDX-License-Identifier: Apache-2.0
"""Prints profiles, and jobs of several ranks, to a terminal."""

import io
import textwrap
from collections.abc import Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opacus_memprof.analysis.view import DeviceView, JobView, Part, ProfileView
from opacus_memprof.profiles.job_summary import Imbalance, JobSummary, Rank, Spread, Straggler
from opacus_memprof.profiles.profile import Finding, Profile
from opacus_memprof.profiles.units import format_bytes, format_count, format_ranks, format_share, shorten_name
from opacus_memprof.reports.tables import bar, table_of

_STATUS_STYLE = {"finished": "green", "running": "cyan"}
_CHECK_STYLE = {True: "green", False: "red", None: "yellow"}
_FINDINGS = 3  # of one kind; profile.json has all
_WIDEST = 100
_MOST_RANKS = 16  # beyond, the highest and the lowest are shown
_LOWEST = 4
_EVEN = 1.0005  # as printed, max / mean is 1.000


def print_report(view: ProfileView | JobView, console: Console) -> None:
    """Prints a profile or a job, and what is known of its privacy."""
    if isinstance(view, JobView):
        print_job(view, console)
    else:
        print_profile(view, console)
    for sentence in view.privacy:
        console.print(f"\n[bold]Privacy check:[/] {escape(sentence)}", highlight=False)


def print_profile(view: ProfileView, console: Console) -> None:
    """Prints the peak of each device by category, component, module and phase, and the findings."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")  # an ASCII terminal shows "?" for a bar
    profile = view.profile
    code = profile.exit_code
    title = _status(profile) if code is None else f"{_status(profile)}, exit code {code}"
    if launch := profile.launch:
        title = f"rank {launch.rank} of {launch.world_size}, {title}"
    _print_header(title, profile, view.virtual_mark, console)
    if not view.devices:
        console.print("No memory was allocated on a device that was profiled.")
    for name, device in view.devices.items():
        _print_device(name, device, console)
    print_findings(profile.findings, console)
    _print_warnings(profile.warnings, console)


def print_job(view: JobView, console: Console) -> None:
    """Prints the peaks of a job's ranks, what makes them differ, and the findings."""
    summary = view.summary
    played = summary.played  # a job of which only some ranks ran, without the others
    title = f"{summary.world_size} ranks" if played is UNSET else f"{format_ranks(played)} of {summary.world_size}"
    _print_header(f"{title}, {_status(summary)}", summary, view.virtual_mark, console)
    imbalance = summary.imbalance
    if imbalance is None:
        console.print("No memory was allocated on a device that was profiled.")
    else:
        _print_ranks(summary.ranks, imbalance.mean_bytes, console)
        _print_imbalance(imbalance, console)
        _print_spread(imbalance.categories, console)
        _print_stragglers(summary.stragglers, console)
        total = format_bytes(summary.total.peaks_bytes)
        whose = "All peaks" if played is UNSET else "The peaks of these ranks"
        console.print(f"\n{whose} together: [bold]{total}[/]", highlight=False)
        _print_rank_check(summary.ranks, console)
    findings = [
        replace(finding, evidence=f"{format_ranks(finding.ranks or ())}: {finding.evidence}")
        for finding in summary.findings
    ]
    print_findings(findings, console)
    _print_warnings(summary.warnings, console)


def print_findings(findings: Sequence[Finding], console: Console, count: int = _FINDINGS) -> None:
    """Prints findings: of each kind the first `count` in full, and the number of the others."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for kind, found in kinds.items():
        for finding in found[:count]:
            _print_finding(kind.replace("_", " "), finding, console)
        if rest := found[count:]:
            size = format_bytes(sum(finding.bytes for finding in rest))
            modules = format_count(len(rest), "more module")
            console.print(f"  and in {modules}, {size}", style="dim", highlight=False)


def _print_finding(kind: str, finding: Finding, console: Console) -> None:
    where = f" in {finding.module}" if finding.module else ""
    size = f", {format_bytes(finding.bytes)}" if finding.bytes else ""
    console.print(f"\n[bold yellow]{escape(kind)}[/]{escape(where)}{size}", highlight=False)
    for name, text in (("evidence", finding.evidence), ("remedy", finding.remedy)):
        width = min(console.width, _WIDEST)
        lines = textwrap.fill(
            text, width, initial_indent=f"  {name}: ", subsequent_indent="    ", break_on_hyphens=False
        )
        console.print(escape(lines), highlight=False, soft_wrap=True)


def _print_header(title: str, profile: Profile | JobSummary, mark: str | None, console: Console) -> None:
    """Prints the first lines: the title, which is markup, the mark of virtual GPUs, and versions."""
    console.print(f"[bold]opacus-memprof[/]  {title}", highlight=False)
    if mark:
        console.print(f"[bold magenta]{escape(mark)}[/]", highlight=False)
    versions = profile.versions
    if known := [f"{name} {versions[name]}" for name in ("torch", "opacus", "cuda") if versions.get(name)]:
        console.print(escape(", ".join(known)), style="dim", highlight=False)


def _status(profile: Profile | JobSummary) -> str:
    """The status as markup, in its colour."""
    status = profile.status
    return f"[{_STATUS_STYLE.get(status, 'red')}]{escape(status.replace('_', ' '))}[/]"


def _print_warnings(warnings: Sequence[str], console: Console) -> None:
    if warnings:
        console.print()
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)


# --- one profile ---


def _print_device(name: str, view: DeviceView, console: Console) -> None:
    peak = f"peak of [bold]{view.peak_size}[/] in {escape(view.peak_moment)}"
    console.print(f"\n[bold]{escape(name)}[/]: {peak}", highlight=False)
    totals = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    totals.add_column(no_wrap=True)
    totals.add_column(justify="right", no_wrap=True)
    totals.add_column(style="dim")
    for row in view.totals:
        totals.add_row(*row)
    console.print(totals)
    _print_categories(view, console)
    if len(view.device.peak.components) > 1:
        _print_parts("component", view.components, console)
    if any(part.name for part in view.modules):
        _print_parts("module", view.modules, console)
    _print_phases(view, console)
    if view.failure:
        console.print(f"\n[red]out of memory:[/] {escape(view.failure)}", highlight=False)
    console.print()
    for check in view.checks:
        style = _CHECK_STYLE[check.agrees]
        console.print(f"[{style}]{escape(check.claim)}[/]{escape(check.details)}", highlight=False)


def _print_categories(view: DeviceView, console: Console) -> None:
    if not view.categories:
        return
    table = table_of("at the peak", ("bytes", "share"), ("",))
    largest = view.categories[0].bytes
    for part in view.categories:
        table.add_row(escape(part.name), part.size, part.share, bar(part.bytes, largest))
        if part.name == "activation_hooks":
            for holder, size in view.holders:
                table.add_row(f"  {holder}", size, "", "", style="dim")
    console.print()
    console.print(table)


def _print_parts(title: str, parts: Sequence[Part], console: Console) -> None:
    table = table_of(title, ("bytes", "share"), ("mostly",))
    for part in parts:
        name = escape(shorten_name(part.name)) or "(no module)"
        table.add_row(name, part.size, part.share, escape(part.mostly), style="dim" if part.is_rest else None)
    console.print()
    console.print(table)


def _print_phases(view: DeviceView, console: Console) -> None:
    if not view.phases:
        return
    table = table_of("phase", ("peak", "step"), ("", "mostly"))
    whole = view.device.peak.requested_bytes
    for row in view.phases:
        table.add_row(escape(row.name), row.size, str(row.step), bar(row.bytes, whole), escape(row.mostly))
    console.print()
    console.print(table)
    console.print(view.phases_note, style="dim", highlight=False)


# --- a job of several ranks ---


def _print_table(columns: Mapping[str, list[str]], words: tuple[str, ...], console: Console) -> None:
    """Prints a table of columns without those that are empty. Those named in `words` are aligned to the left, and
    shortened if the terminal is too narrow."""
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, cells in shown.items():
        if name in words:
            table.add_column(name, no_wrap=True)
        else:
            table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, [name, *cells])))
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console.print()
    console.print(table)


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def _print_ranks(rows: list[Rank], mean: int, console: Console) -> None:
    """Prints the peak of each rank; of more than _MOST_RANKS, the highest and the lowest."""
    measured = [(row, row.peak) for row in rows if row.peak]
    left_out = 0
    if len(measured) > _MOST_RANKS:
        measured.sort(key=lambda pair: (-pair[1].requested_bytes, pair[0].rank))
        left_out = len(measured) - _MOST_RANKS
        del measured[_MOST_RANKS - _LOWEST : -_LOWEST]
    several_hosts = len({row.host for row in rows}) > 1
    shown, peaks = [row for row, _ in measured], [peak for _, peak in measured]
    columns = {
        "rank": [str(row.rank) for row in shown],
        "peak": [_bytes(peak.requested_bytes) for peak in peaks],
        "of mean": [format_share(peak.requested_bytes, mean) for peak in peaks],
        "reserved": [_bytes(peak.reserved_bytes) for peak in peaks],
        "outside": [_bytes(row.outside_pytorch) for row in shown],
        "steps": [str(row.steps) for row in shown],
        "phase": [peak.phase for peak in peaks],
        "mostly": [escape(max(peak.categories, key=peak.categories.__getitem__, default="")) for peak in peaks],
        "device": [str(row.device) for row in shown],
        "host": [escape(str(row.host)) if several_hosts else "" for row in shown],
        "": ["" if row.status == "finished" else f"[red]{row.status.replace('_', ' ')}[/]" for row in shown],
    }
    _print_table(columns, ("phase", "mostly", "device", "host", ""), console)
    if left_out:
        highest = _MOST_RANKS - _LOWEST
        console.print(f"the {highest} highest and the {_LOWEST} lowest; {left_out} more lie between", style="dim")


def _print_imbalance(imbalance: Imbalance, console: Console) -> None:
    above = imbalance.max_bytes - imbalance.mean_bytes
    line = f"\nimbalance (max / mean): [bold]{imbalance.ratio:.3f}[/]"
    if above > 0 and imbalance.cause_bytes > 0:
        line += (
            f", rank {imbalance.rank} has {format_bytes(above)} more than the mean; of {imbalance.cause} it has "
            f"{format_bytes(imbalance.cause_bytes)} more"
        )
    console.print(line, highlight=False)


def _print_spread(categories: Mapping[str, Spread], console: Console) -> None:
    rows = sorted(categories.items(), key=lambda item: (-item[1].mean_bytes, item[0]))
    columns = {
        "at the peak": [escape(category) for category, _ in rows],
        "mean": [format_bytes(spread.mean_bytes) for _, spread in rows],
        "max": [format_bytes(spread.max_bytes) for _, spread in rows],
        "max / mean": [f"{spread.ratio:.3f}" for _, spread in rows],
        "on rank": [str(spread.rank) if spread.ratio > _EVEN else "" for _, spread in rows],
    }
    _print_table(columns, ("at the peak",), console)


def _print_stragglers(stragglers: list[Straggler], console: Console) -> None:
    if not stragglers:
        return
    names, verb = format_ranks(row.rank for row in stragglers), "set" if len(stragglers) > 1 else "sets"
    console.print(
        f"\n[yellow]{names}[/] {verb} what batch fits everywhere: the highest has "
        f"{format_bytes(stragglers[0].above_median)} more than the median rank",
        highlight=False,
    )


def _print_rank_check(rows: list[Rank], console: Console) -> None:
    wrong = [row.rank for row in rows if row.peak and row.peak.remainder_bytes]
    if wrong:
        console.print(
            f"[red]Σ categories misses bytes of the requested ones on {format_ranks(wrong)}[/]", highlight=False
        )
    else:
        console.print("[green]Σ categories = requested bytes on every rank: exact[/]", highlight=False)
