# SPDX-License-Identifier: Apache-2.0
"""Prints the summary of a job's ranks to a terminal."""

from collections.abc import Mapping

from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opacus_memprof.analysis.job import list_ranks
from opacus_memprof.profiles.job_summary import Imbalance, JobSummary, Rank, Spread, Straggler
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.findings import print_findings
from opacus_memprof.reports.header import print_header, print_warnings, status_markup

_MOST_ROWS = 16  # of ranks; beyond, the highest and the lowest are shown
_LOWEST = 4
_EVEN = 1.0005  # as printed, max / mean is 1.000


def print_job(summary: JobSummary, console: Console) -> None:
    """Prints the content of ranks.json."""
    played = summary.played  # a job of which only some ranks ran, without the others
    title = f"{summary.world_size} ranks" if played is UNSET else f"{list_ranks(played)} of {summary.world_size}"
    print_header(f"{title}, {status_markup(summary)}", summary, console)
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
        _print_reconciliation(summary.ranks, console)
    findings = [
        replace(finding, evidence=f"{list_ranks(finding.ranks or ())}: {finding.evidence}")
        for finding in summary.findings
    ]
    print_findings(findings, console)
    print_warnings(summary.warnings, console)


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
    """Prints the peak of each rank; of more than _MOST_ROWS, the highest and the lowest."""
    measured = [(row, row.peak) for row in rows if row.peak]
    left_out = 0
    if len(measured) > _MOST_ROWS:
        measured.sort(key=lambda pair: (-pair[1].requested_bytes, pair[0].rank))
        left_out = len(measured) - _MOST_ROWS
        del measured[_MOST_ROWS - _LOWEST : -_LOWEST]
    several_hosts = len({row.host for row in rows}) > 1
    shown, peaks = [row for row, _ in measured], [peak for _, peak in measured]
    columns = {
        "rank": [str(row.rank) for row in shown],
        "peak": [_bytes(peak.requested_bytes) for peak in peaks],
        "of mean": [f"{100 * peak.requested_bytes / mean:.1f} %" if mean else "" for peak in peaks],
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
        highest = _MOST_ROWS - _LOWEST
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
    names, verb = list_ranks(row.rank for row in stragglers), "set" if len(stragglers) > 1 else "sets"
    console.print(
        f"\n[yellow]{names}[/] {verb} what batch fits everywhere: the highest has "
        f"{format_bytes(stragglers[0].above_median)} more than the median rank",
        highlight=False,
    )


def _print_reconciliation(rows: list[Rank], console: Console) -> None:
    wrong = [row.rank for row in rows if row.peak and row.peak.remainder_bytes]
    if wrong:
        console.print(
            f"[red]Σ categories misses bytes of the requested ones on {list_ranks(wrong)}[/]", highlight=False
        )
    else:
        console.print("[green]Σ categories = requested bytes on every rank: exact[/]", highlight=False)
