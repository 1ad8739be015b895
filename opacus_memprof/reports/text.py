# SPDX-License-Identifier: Apache-2.0
"""Prints profiles, running ones too, and jobs of several ranks to a terminal. All terminal reports use its tables."""

import io
import re
from collections.abc import Sequence

from msgspec import UNSET
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from opacus_memprof.analysis.job_view import Columns, JobView
from opacus_memprof.analysis.live import RunningDevice, RunningProfile
from opacus_memprof.analysis.profile_view import Check, DeviceView, Part, ProfileView, groups_of, parts_of
from opacus_memprof.language import ESCAPED, tr, tr_sentence
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.profile import Finding, Profile, virtual_mark
from opacus_memprof.profiles.units import column_format, format_bytes, format_moment, format_signed_bytes, shorten_name

_BAR = 20  # characters of the longest bar
_STATUS_STYLE = {"finished": "green", "running": "cyan"}
_CHECK_STYLE = {True: "green", False: "red", None: "yellow"}
_FINDINGS = 3  # of one kind; profile.json has all
_WIDEST = 100
# Where a line may break: after a space, and after a Chinese character with the punctuation that follows it.
_CHUNK = re.compile(r"[^\s\u2e80-\uffef]*(?:[\u2e80-\uffef][，。：；、！？）》”]*|\s+|$)")
_STATUS = ""  # the title of the column of ranks that did not finish
_TOP_MODULES = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_NEWEST_STEPS = 60  # in the trend's line
_STYLE = {"running": "cyan", "ended": "green", "killed": "red"}


def print_report(view: ProfileView | JobView, console: Console) -> None:
    """Prints a profile or a job, and the result of its privacy check."""
    if isinstance(view, JobView):
        print_job(view, console)
    else:
        print_profile(view, console)
    for sentence in view.privacy:
        console.print(f"\n[bold]{tr('Privacy check:')}[/] {escape(privacy_sentence(sentence))}", highlight=False)


def privacy_sentence(sentence: str) -> str:
    """Returns the result of a privacy check in the current language, translated part by part."""
    said, first, why = sentence.removesuffix(".").partition(", first: ")
    if not re.match(r"\w+ on \S+; ", said):
        return tr_sentence(sentence)  # that it could not be read
    parts = [tr(", ").join(map(tr_sentence, re.split(", (?!because)(?=[a-z])", part))) for part in said.split("; ")]
    if first:
        known = (tr_sentence(end, least_words=2) for end in (f"{why}.", why))  # some refusals end with a point
        reason = next((each for each in known if not each.startswith(why)), why)
        parts[-1] += tr(", first: {why}", why=reason.removesuffix("。"))
    return tr("{sentences}.", sentences=tr("; ").join(parts))


def print_profile(view: ProfileView, console: Console) -> None:
    """Prints the peak of each device by category, component, module and phase, and the findings."""
    escape_what_cannot_be_shown(console)
    profile = view.profile
    code = profile.exit_code
    title = status_markup(profile) + ("" if code is None else tr(", exit code {code}", code=code))
    if launch := profile.launch:
        title = tr("rank {rank} of {count}, ", rank=launch.rank, count=launch.world_size) + title
    _print_header(title, profile, view.virtual_mark, console)
    if not view.devices and view.out_of_memory is None:
        console.print(tr("No memory was allocated on a device that was profiled."))
    for name, device in view.devices.items():
        _print_device(name, device, console)
    _print_unknown_reads(profile, console)
    print_findings(profile.findings, console)
    print_warnings(profile.warnings, console)


def escape_what_cannot_be_shown(console: Console) -> None:
    """Makes a console escape the characters that its encoding does not have, instead of failing."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors=ESCAPED)


def print_job(view: JobView, console: Console) -> None:
    """Prints the peaks of a job's ranks, the reasons for their differences, and the findings."""
    _print_header(f"{tr_sentence(view.title)}, {status_markup(view.summary)}", view.summary, view.virtual_mark, console)
    if not view.ranks:
        console.print(tr("No memory was allocated on a device that was profiled."))
    else:
        _print_columns(view.ranks, ("phase", "mostly", "device", "host", _STATUS), console)
        if view.left_out:
            console.print(tr_sentence(view.left_out), style="dim")
        ratio, cause = view.imbalance
        console.print(f"\n{tr('imbalance (max / mean):')} [bold]{ratio}[/]{tr_sentence(cause)}", highlight=False)
        _print_columns(view.categories, ("at the peak",), console)
        ranks, effect = view.stragglers
        if ranks:
            console.print(f"\n[yellow]{ranks}[/] {tr_sentence(effect)}", highlight=False)
        whose, size = view.total
        together = tr("{peaks} together:", peaks=tr_sentence(whose))
        console.print(f"\n{together} [bold]{size}[/]", highlight=False)
        print_check(view.check, console)
    print_findings(view.findings, console)
    print_warnings(view.summary.warnings, console)


def print_findings(findings: Sequence[Finding], console: Console, count: int = _FINDINGS) -> None:
    """Prints the first `count` findings of each kind, and the number of the others."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for kind, found in kinds.items():
        for finding in found[:count]:
            _print_finding(tr(kind.replace("_", " ")), finding, console)
        if rest := found[count:]:
            size = format_bytes(sum(finding.bytes for finding in rest))
            console.print(
                tr("  and in {modules}, {size}", modules=more_modules(len(rest)), size=size),
                style="dim",
                highlight=False,
            )


def _print_finding(kind: str, finding: Finding, console: Console) -> None:
    where = tr(" in {module}", module=finding.module) if finding.module else ""
    size = f", {format_bytes(finding.bytes)}" if finding.bytes else ""
    console.print(f"\n[bold yellow]{escape(kind)}[/]{escape(where)}{size}", highlight=False)
    for text in (
        tr("evidence: {text}", text=tr_sentence(finding.evidence)),
        tr("remedy: {text}", text=tr_sentence(finding.remedy)),
    ):
        print_indented(text, console, first="  ", following="    ")


def print_indented(
    text: str, console: Console, first: str = "   ", following: str = "   ", style: str | None = None
) -> None:
    """Prints a paragraph that is indented by `first` in its first line, and by `following` in the others."""
    lines = wrap(text, min(console.width, _WIDEST), first, following)
    console.print(escape("\n".join(lines)), style=style, highlight=False, soft_wrap=True)


def wrap(text: str, width: int, first: str, following: str) -> list[str]:
    """Returns lines of at most `width` cells, of which a Chinese character takes two; see `print_indented`."""
    lines = [first]
    for chunk in _CHUNK.findall(text):
        if cell_len(lines[-1]) + cell_len(chunk.rstrip()) > width and lines[-1].strip():
            lines.append(following)
            chunk = chunk.lstrip()
        lines[-1] += chunk
    return [line.rstrip() for line in lines]


def more_modules(count: int) -> str:
    return tr("1 more module") if count == 1 else tr("{count} more modules", count=count)


def _print_header(title: str, profile: Profile | JobSummary, mark: str | None, console: Console) -> None:
    """Prints the first lines: the title, which is markup, the mark of virtual GPUs, and versions."""
    console.print(f"[bold]opacus-memprof[/]  {title}", highlight=False)
    if mark:
        console.print(f"[bold magenta]{escape(tr_sentence(mark))}[/]", highlight=False)
    versions = profile.versions
    if known := [f"{name} {versions[name]}" for name in ("torch", "opacus", "cuda") if versions.get(name)]:
        console.print(escape(", ".join(known)), style="dim", highlight=False)


def status_markup(profile: Profile | JobSummary) -> str:
    """Returns the status as markup, in its colour."""
    status = profile.status
    return f"[{_STATUS_STYLE.get(status, 'red')}]{escape(tr(status.replace('_', ' ')))}[/]"


def print_warnings(warnings: Sequence[str], console: Console) -> None:
    if warnings:
        console.print()
    for warning in warnings:
        console.print(f"[yellow]{tr('warning:')}[/] {escape(tr_sentence(warning))}", highlight=False)


def table_of(name: str, numbers: tuple[str, ...], words: tuple[str, ...]) -> Table:
    """Returns a table without borders: a first column `name`, columns of numbers, columns of words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name, overflow="ellipsis", no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for column in words:
        table.add_column(column, no_wrap=True)
    return table


def bar(part: int, whole: int) -> str:
    """Returns a bar of eighths of a character, at most _BAR characters long."""
    eighths = max(0, min(round(8 * _BAR * part / whole), 8 * _BAR)) if whole else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


# --- one profile ---


def _print_device(name: str, view: DeviceView, console: Console) -> None:
    peak = tr(
        "peak of {size} in {moment}", size=f"[bold]{view.peak_size}[/]", moment=escape(tr_sentence(view.peak_moment))
    )
    console.print(f"\n[bold]{escape(name)}[/]: {peak}", highlight=False)
    totals = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    totals.add_column(no_wrap=True)
    totals.add_column(justify="right", no_wrap=True)
    totals.add_column(style="dim")
    for row in view.totals:
        totals.add_row(tr(row[0]), row[1], tr_sentence(row[2]))
    console.print(totals)
    _print_categories(view, console)
    if len(view.device.peak.components) > 1:
        _print_parts(tr("component"), view.components, console)
    if any(part.name for part in view.modules):
        _print_parts(tr("module"), view.modules, console)
    if view.lines:
        _print_parts(tr("line of the program"), view.lines, console)
    print_unattributed(view.unattributed, console)
    _print_phases(view, console)
    if view.failure:
        console.print(f"\n[red]{tr('out of memory')}:[/] {escape(tr_sentence(view.failure))}", highlight=False)
    console.print()
    for check in view.checks:
        print_check(check, console)


def _print_categories(view: DeviceView, console: Console) -> None:
    if not view.categories:
        return
    table = table_of(tr("at the peak"), (tr("bytes"), tr("share")), ("",))
    largest = view.categories[0].bytes
    for part in view.categories:
        table.add_row(escape(part.name), part.size, part.share, bar(part.bytes, largest))
        if part.name == "activation_hooks":
            for holder, size in view.holders:
                table.add_row(f"  {tr(holder)}", size, "", "", style="dim")
    console.print()
    console.print(table)


def _print_parts(title: str, parts: Sequence[Part], console: Console) -> None:
    table = table_of(title, (tr("bytes"), tr("share")), (tr("mostly"),))
    formatted = column_format(part.bytes for part in parts)
    for part in parts:
        name = escape(shorten_name(part.name)) or tr("(no module)")
        name = tr_sentence(name) if part.is_rest else name
        table.add_row(
            name, formatted(part.bytes), part.share, escape(part.mostly), style="dim" if part.is_rest else None
        )
    console.print()
    console.print(table)


def print_unattributed(parts: Sequence[Part], console: Console) -> None:
    """Prints the result of analysis.profile_view.unattributed_parts."""
    if not parts:
        return
    table = table_of(tr("UNATTRIBUTED, BY LINE"), ("", ""), ())
    formatted = column_format(part.bytes for part in parts)
    for part in parts:
        size = formatted(part.bytes)
        name = tr_sentence(part.name) if part.is_rest else shorten_name(part.name, 48)
        table.add_row(escape(name), size, part.share, style="dim" if part.is_rest else None)
    console.print()
    console.print(table)


def _print_unknown_reads(profile: Profile, console: Console) -> None:
    """Prints what the program read of values that the virtual GPU had not computed, most often read first."""
    if profile.virtual is UNSET or not (reads := profile.virtual.unknown_reads):
        return
    table = table_of(tr("read, but not computed"), (tr("reads"),), (tr("operation"),))
    for use in sorted(reads, key=lambda use: -use.count):
        line = escape(shorten_name(use.line.rpartition("/")[2], 48)) or tr("(no known line)")
        table.add_row(line, str(use.count), escape(use.operation))
    console.print()
    console.print(table)


def _print_phases(view: DeviceView, console: Console) -> None:
    if not view.phases:
        return
    table = table_of(tr("phase"), (tr("peak"), tr("step")), ("", tr("mostly")))
    whole = view.device.peak.requested_bytes
    formatted = column_format(row.bytes for row in view.phases)
    for row in view.phases:
        table.add_row(escape(row.name), formatted(row.bytes), str(row.step), bar(row.bytes, whole), escape(row.mostly))
    console.print()
    console.print(table)
    console.print(tr_sentence(view.phases_note), style="dim", highlight=False)


def print_check(check: Check, console: Console) -> None:
    style = _CHECK_STYLE[check.agrees]
    claim, details = escape(tr_sentence(check.claim)), escape(tr_sentence(check.details))
    console.print(f"[{style}]{claim}[/]{details}", highlight=False)


def _print_columns(columns: Columns, words: tuple[str, ...], console: Console) -> None:
    """Prints the columns that have a cell with text.

    Columns named in `words` are aligned to the left, and shortened if the terminal is too narrow.
    """
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, cells in shown.items():
        title = tr(name) if name else ""
        if name in words:
            table.add_column(title, no_wrap=True, style="red" if name == _STATUS else None)
        else:
            table.add_column(title, justify="right", no_wrap=True, min_width=max(map(cell_len, [title, *cells])))
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(escape, row))
    console.print()
    console.print(table)


def live_view(live: RunningProfile) -> RenderableType:
    """Renders a running profile, from analysis.live.ProfileFollower.read."""
    state = tr(
        "process {pid} {status}  step {step} (logical step {logical})  {phase}  {events} events",
        pid=live.pid,
        status=f"[{_STYLE[live.status]}]{tr(live.status)}[/]",
        step=live.step,
        logical=live.logical_step,
        phase=escape(tr_sentence(live.phase.replace("_", " "))),
        events=live.events,
    )
    parts: list[RenderableType] = [Text.from_markup(f"[bold]opacus-memprof[/]  {state}")]
    if mark := virtual_mark(live.virtual):
        parts.append(Text(tr_sentence(mark), "bold magenta"))
    if live.dropped:
        lost = tr(
            "{count} events were lost: the disk is full or too slow, or the event file was full", count=live.dropped
        )
        parts.append(Text(lost, "yellow"))
    if live.out_of_memory:
        parts.append(Text(tr("failed allocations: {count}", count=live.out_of_memory), "red"))
    for name, device in live.devices.items():
        parts += ["", *_device(name, device)]
    if not live.devices:
        parts.append(Text(tr("nothing is allocated yet"), "dim"))
    return Group(*parts)


def _device(name: str, device: RunningDevice) -> list[RenderableType]:
    requested, peak = device.requested_bytes, device.peak_bytes
    sizes = tr(
        "{size} live  {bar}  peak {peak} in step {step}",
        size=format_bytes(requested),
        bar=bar(requested, peak),
        peak=format_bytes(peak),
        step=device.peak_step,
    )
    parts: list[RenderableType] = [Text.from_markup(f"[bold]{escape(name)}[/]  {sizes}")]
    if device.reserved_peak is not None:
        reserved = device.reserved_peak
        moment = tr_sentence(format_moment(reserved.phase, reserved.step))
        largest = tr("largest reserved {size} in {moment}", size=format_bytes(reserved.bytes), moment=moment)
        parts.append(Text(largest, "dim"))
    if trend := _trend(device.step_ends, device.bytes_per_step):
        parts.append(Text(trend, "dim"))
    if categories := parts_of(device.categories, requested):
        table = table_of(tr("category"), (tr("bytes"), tr("share")), ("",))
        for part in categories:
            table.add_row(escape(part.name), part.size, part.share, bar(part.bytes, categories[0].bytes))
        parts += ["", table]
    named = {module: sizes for module, sizes in device.modules.items() if module}
    if modules := groups_of(named, requested, _TOP_MODULES):
        table = table_of(tr("module"), (tr("bytes"), tr("share")), (tr("mostly"),))
        for part in modules[:_TOP_MODULES]:
            table.add_row(escape(shorten_name(part.name)), part.size, part.share, escape(part.mostly))
        parts += ["", table]
    return parts


def _trend(ends: Sequence[int], slope: int | None) -> str:
    """Formats the bytes at the ends of the newest steps as a line, with their growth per step."""
    if slope is None:
        return ""
    shown = ends[-_NEWEST_STEPS:]
    low, high = min(shown), max(shown)
    top = len(_SPARKS) - 1
    line = "".join(_SPARKS[(size - low) * top // (high - low) if high > low else 0] for size in shown)
    growth = tr("{size} a step", size=format_signed_bytes(slope)) if slope else tr("steady")
    return tr("after each step  {line}  {growth}", line=line, growth=growth)
