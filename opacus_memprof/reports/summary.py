# SPDX-License-Identifier: Apache-2.0
"""Prints the first screen of a profile: the verdict, possible improvements, and the live memory.

`report --full` prints all tables (reports.text), and oom_report.txt has the complete report of a failed allocation
(reports.oom).
"""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opacus_memprof.analysis.defects import DEFECTS
from opacus_memprof.analysis.job_view import JobView
from opacus_memprof.analysis.profile_view import DeviceView, ProfileView, largest_first, unattributed_parts
from opacus_memprof.analysis.verdict_view import VerdictView, failure_verdict
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.profile import Finding, virtual_mark
from opacus_memprof.profiles.units import column_format, format_bytes, format_ranges, format_share, shorten_name
from opacus_memprof.reports.text import (
    bar,
    escape_what_cannot_be_shown,
    more_modules,
    print_check,
    print_indented,
    print_job,
    print_unattributed,
    print_warnings,
    privacy_sentence,
    status_markup,
    table_of,
)

_CATEGORIES = 5
_MODULES = 5
_OUTCOME_STYLE = {"failed": "bold red", "fits": "bold green", "peak": "bold"}
_EFFECT_STYLE = {"too large": "yellow", "fits tightly": "yellow", "fails": "red"}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class ModuleRow:
    """A module, or modules whose names differ in one number.

    Attributes:
        name: the name, such as "blocks.[0-11].mlp".
        count: the number of modules.
        largest: the bytes of the largest one.
        total: the bytes of all.
    """

    name: str
    count: int
    largest: int
    total: int


def fold_modules(sizes: Mapping[str, int]) -> list[ModuleRow]:
    """Groups modules whose names differ in their first number, the largest groups first."""
    groups: dict[str, dict[int, int]] = {}
    singles: dict[str, int] = {}
    for name, size in sizes.items():
        if found := _NUMBER.search(name):
            pattern = f"{name[: found.start()]}*{name[found.end() :]}"
            groups.setdefault(pattern, {})[int(found[0])] = size
        else:
            singles[name] = size
    rows = [ModuleRow(name, 1, size, size) for name, size in singles.items() if size]
    for pattern, by_number in groups.items():
        numbers = sorted(number for number, size in by_number.items() if size)
        if numbers:
            name = pattern.replace("*", f"[{format_ranges(numbers, ',')}]" if len(numbers) > 1 else str(numbers[0]), 1)
            found_sizes = [by_number[number] for number in numbers]
            rows.append(ModuleRow(name, len(numbers), max(found_sizes), sum(found_sizes)))
    return sorted(rows, key=lambda row: (-row.total, row.name))


def print_summary(view: ProfileView | JobView, console: Console, has_shown_failure: bool = False) -> None:
    """Prints the first screen of a profile, or a job.

    Args:
        view: the profile or job.
        console: where to print.
        has_shown_failure: whether `print_failure` has been printed already.
    """
    escape_what_cannot_be_shown(console)
    if isinstance(view, JobView):
        print_job(view, console)
        return
    profile, launch = view.profile, view.profile.launch
    code = "" if profile.exit_code is None else tr(", exit code {code}", code=profile.exit_code)
    rank = tr("rank {rank} of {count}, ", rank=launch.rank, count=launch.world_size) if launch else ""
    console.print(
        f"[bold]opacus-memprof[/]  {escape(view.name)}: {rank}{status_markup(profile)}{code}", highlight=False
    )
    if profile.status == "killed":
        console.print(tr("Findings, predictions and events of the last second may be missing."), style="yellow")
    if profile.status == "running":
        console.print(tr("The figures are those so far."), style="yellow")
    failed = view.out_of_memory if profile.status == "out_of_memory" else None
    defects = [finding for finding in profile.findings if finding.kind in DEFECTS]
    _print_findings(defects, console, evidence=True)
    if defects:
        console.print()
    if failed is not None:
        if not has_shown_failure:
            print_failure(failed, console)
    else:
        if view.virtual_mark:
            console.print(f"[bold magenta]{escape(tr_sentence(view.virtual_mark))}[/]", highlight=False)
        if not view.devices:
            console.print(tr("No memory was allocated on a device that was profiled."))
        for device, verdict in zip(view.devices.values(), view.verdicts, strict=True):
            print_verdict(verdict, console)
            if device.failure:
                console.print(f"[red]{tr('out of memory')}:[/] {escape(tr_sentence(device.failure))}", highlight=False)
    _print_findings([finding for finding in profile.findings if finding.kind not in DEFECTS], console)
    if failed is None:
        for device in view.devices.values():
            _print_held(tr("AT THE PEAK"), device.device.peak.categories, device.device.peak.requested_bytes, console)
            _print_modules(_sizes_of(device.device.peak.modules), console)
            print_unattributed(device.unattributed, console)
            _print_phases(device, console)
    _print_checks(view, console)
    print_warnings(profile.warnings, console)
    for sentence, count in Counter(view.privacy).items():
        times = f" (×{count})" if count > 1 else ""  # noqa: RUF001
        console.print(f"\n[bold]{tr('Privacy check:')}[/] {escape(privacy_sentence(sentence))}{times}", highlight=False)


def print_failure(report: OomReport, console: Console) -> None:
    """Prints the first screen of a failed allocation: the missing memory, changes that fit, and the live memory."""
    if mark := virtual_mark(report.virtual):
        console.print(f"[bold magenta]{escape(tr_sentence(mark))}[/]", highlight=False)
    print_verdict(failure_verdict(report), console)
    _print_held(tr("HELD AT THE FAILURE"), report.holders.categories, report.live_bytes, console)
    _print_modules(_sizes_of(report.holders.modules), console, count=3)
    holders = report.holders
    print_unattributed(unattributed_parts(holders.categories, holders.unattributed, report.live_bytes), console)


def print_verdict(verdict: VerdictView, console: Console) -> None:
    """Prints the verdict on a device, and what to change first."""
    escape_what_cannot_be_shown(console)
    style = _OUTCOME_STYLE[verdict.outcome]
    headline, where = escape(tr_sentence(verdict.headline)), escape(tr_sentence(verdict.where))
    console.print(f"[{style}]{headline}[/] {where}", highlight=False)
    for label, text in verdict.lines:
        shown = escape(tr_sentence(text))
        console.print(f"[bold]{tr_sentence(label)}[/] {shown}" if label else shown, highlight=False)
    if not verdict.fixes:
        if verdict.outcome == "failed":
            console.print(f"\n{escape(tr_sentence(verdict.heading))}", highlight=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column()
    table.add_column(escape(tr_sentence(verdict.heading)), overflow="fold", ratio=1)
    table.add_column(tr("PEAK"), justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for number, fix in enumerate(verdict.fixes, 1):
        effect = f"[{_EFFECT_STYLE.get(fix.effect, 'green')}]{escape(tr_sentence(fix.effect))}[/]"
        note = f"\n[dim]{escape(tr_sentence(fix.note))}[/]" if fix.note else ""
        title = escape(tr_sentence(fix.title)) + note
        table.add_row(str(number), title, escape(fix.peak), effect, escape(tr_sentence(fix.evidence)))
    console.print()
    console.print(table)
    for line in verdict.fixes[0].code.splitlines():  # whole, so that it can be copied
        console.print(f"   {escape(line)}", style="cyan", highlight=False, soft_wrap=True)
    if verdict.command:
        console.print(
            f"{tr('try these without a GPU:')} {escape(verdict.command)}", style="dim", soft_wrap=True, highlight=False
        )


def format_verdict(verdict: VerdictView, width: int = 100) -> str:
    """Formats a verdict as text of lines of at most `width` characters, without colours."""
    text = io.StringIO()
    print_verdict(verdict, Console(file=text, width=width, color_system=None))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _print_findings(findings: Sequence[Finding], console: Console, *, evidence: bool = False) -> None:
    """Prints the remedies, one for each kind of finding, with what was observed if `evidence` is True."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for kind, found in kinds.items():
        where = tr(" in {module}", module=found[0].module) if found[0].module else ""
        more = tr(" and {modules}", modules=more_modules(len(found) - 1)) if len(found) > 1 else ""
        total = sum(finding.bytes for finding in found)
        size = f", {format_bytes(total)}" if total else ""
        title = tr(kind.replace("_", " "))
        console.print(f"\n[bold yellow]{escape(title)}[/]{escape(where)}{more}{size}", highlight=False)
        if evidence:
            print_indented(tr_sentence(found[0].evidence), console)
        fix = f"   {tr_sentence('FIX')}  " if evidence else "   "
        print_indented(tr_sentence(found[0].remedy), console, first=fix)


def _print_held(heading: str, categories: Mapping[str, int], whole: int, console: Console) -> None:
    rows = largest_first(categories)
    if not rows:
        return
    table = table_of(heading, ("", ""), ("",))
    rest = sum(size for _, size in rows[_CATEGORIES:])
    formatted = column_format([*(size for _, size in rows[:_CATEGORIES]), rest])
    for name, size in rows[:_CATEGORIES]:
        table.add_row(escape(name), formatted(size), format_share(size, whole), bar(size, rows[0][1]))
    if rest:
        more = tr("{count} more", count=len(rows) - _CATEGORIES)
        table.add_row(more, formatted(rest), format_share(rest, whole), "", style="dim")
    console.print()
    console.print(table)


def _print_modules(sizes: Mapping[str, int], console: Console, count: int = _MODULES) -> None:
    rows = fold_modules({name: size for name, size in sizes.items() if name})
    if not rows:
        return
    table = table_of(tr("MODULES"), ("", tr("each"), tr("together")), ())
    rest = sum(row.total for row in rows[count:])
    formatted = column_format([rest, *(size for row in rows[:count] for size in (row.largest, row.total))])
    for row in rows[:count]:
        times = f"×{row.count}" if row.count > 1 else ""  # noqa: RUF001
        most = "≤ " if row.total < row.count * row.largest else ""  # not all of them have as much
        table.add_row(escape(shorten_name(row.name)), times, f"{most}{formatted(row.largest)}", formatted(row.total))
    if rest:
        table.add_row(tr("{count} more", count=len(rows) - count), "", "", formatted(rest), style="dim")
    console.print()
    console.print(table)


def _sizes_of(groups: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(sizes.values()) for name, sizes in groups.items()}


def _print_phases(view: DeviceView, console: Console) -> None:
    if not view.phases:
        return
    table = table_of(tr("PHASES"), (tr("peak"), tr("step")), (tr("mostly"),))
    rows = sorted(view.phases, key=lambda row: -row.bytes)[:_CATEGORIES]
    formatted = column_format(row.bytes for row in rows)
    for row in rows:
        table.add_row(escape(row.name), formatted(row.bytes), str(row.step), escape(row.mostly))
    console.print()
    console.print(table)


def _print_checks(view: ProfileView, console: Console) -> None:
    checks = [check for device in view.devices.values() for check in device.checks]
    console.print()
    if checks and all(check.agrees for check in checks):
        console.print(f"[green]{tr('every byte accounted for')}[/]", highlight=False)
    else:
        for check in checks:
            print_check(check, console)
    directory = escape(str(view.directory or "DIR"))
    line = tr("all tables: opacus-memprof report {directory} --full, a page: --html", directory=directory)
    console.print(line, style="dim", highlight=False, soft_wrap=True)  # whole, so that it can be copied
