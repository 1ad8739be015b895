# SPDX-License-Identifier: Apache-2.0
"""Prints the summary of a profile to a terminal."""

import io
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opacus_memprof.profiles.profile import Device, DeviceSnapshot, FailedAllocation, Groups, Peak, PhasePeak, Profile
from opacus_memprof.profiles.units import format_bytes, format_count
from opacus_memprof.reports.findings import print_findings
from opacus_memprof.reports.header import print_header, print_warnings, status_markup
from opacus_memprof.reports.moments import describe_time, steps_note
from opacus_memprof.reports.tables import bar, largest_first, share, shorten_name, table_of

_TOP_MODULES = 10
_MEANING = {
    "requested_bytes": "what the program asked for",
    "rounding": "blocks are larger than what was asked for",
    "allocated_bytes": "what the allocator had handed out",
    "cached": "kept by the allocator for later",
    "reserved_bytes": "what the allocator had taken from the device",
}
_LABEL = {
    "requested_bytes": "requested",
    "rounding": "+ rounding",
    "allocated_bytes": "= allocated",
    "cached": "+ cached",
    "reserved_bytes": "= reserved",
}
_SPLIT_LABEL = {"shared_with_autograd": "autograd holds them as well", "opacus_only": "only Opacus holds them"}


def print_summary(profile: Profile, console: Console) -> None:
    """Prints the summary of a profile."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")  # an ASCII terminal shows "?" for a bar
    _print_header(profile, console)
    if not profile.devices:
        console.print("No memory was allocated on a device that was profiled.")
    for name, device in profile.devices.items():
        _print_device(name, device, console)
    print_findings(profile.findings, console)
    print_warnings(profile.warnings, console)


def _print_header(profile: Profile, console: Console) -> None:
    code = profile.exit_code
    ended = status_markup(profile) if code is None else f"{status_markup(profile)}, exit code {code}"
    if launch := profile.launch:
        ended = f"rank {launch.rank} of {launch.world_size}, {ended}"
    print_header(ended, profile, console)


def _print_device(name: str, device: Device, console: Console) -> None:
    peak, requested = device.peak, device.peak.requested_bytes
    time = f"in {describe_time(peak.phase, peak.step, peak.logical_step)}"
    console.print(
        f"\n[bold]{escape(name)}[/]: peak of [bold]{format_bytes(requested)}[/] {escape(time)}", highlight=False
    )
    _print_sums(peak, console)
    _print_categories(peak, requested, console)
    _print_modules(peak, requested, console)
    _print_phases(device.phases, requested, console)
    _print_failures(device.out_of_memory, console)
    _print_reconciliation(peak, device.snapshots, console)


def _print_sums(peak: Peak, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for key, label in _LABEL.items():
        if (size := getattr(peak, key)) is not None:
            table.add_row(label, format_bytes(size), _MEANING[key])
    console.print(table)


def _print_categories(peak: Peak, requested: int, console: Console) -> None:
    rows = largest_first(peak.categories)
    if not rows:
        return
    table = table_of("at the peak", ("bytes", "share"), ("",))
    largest = max(size for _, size in rows)
    for category, size in rows:
        table.add_row(escape(category), format_bytes(size), share(size, requested), bar(size, largest))
        if category == "activation_hooks":
            for part, part_bytes in largest_first(dict(peak.activation_hooks)):
                table.add_row(f"  {_SPLIT_LABEL.get(part, part)}", format_bytes(part_bytes), "", "", style="dim")
    console.print()
    console.print(table)


def _print_modules(peak: Peak, requested: int, console: Console) -> None:
    if len(peak.components) > 1:
        _print_groups("component", peak.components, requested, console)
    if any(name and any(sizes.values()) for name, sizes in peak.modules.items()):
        _print_groups("module", peak.modules, requested, console)


def _print_groups(title: str, groups: Groups, requested: int, console: Console) -> None:
    """Prints the largest modules or components, and the sum of the others."""
    totals = largest_first({name: sum(sizes.values()) for name, sizes in groups.items()})
    table = table_of(title, ("bytes", "share"), ("mostly",))
    for name, size in totals[:_TOP_MODULES]:
        mostly = escape(largest_first(groups[name])[0][0])
        table.add_row(escape(shorten_name(name)) or "(no module)", format_bytes(size), share(size, requested), mostly)
    rest = totals[_TOP_MODULES:]
    if rest:
        size = sum(size for _, size in rest)
        table.add_row(f"{len(rest)} more", format_bytes(size), share(size, requested), "", style="dim")
    console.print()
    console.print(table)


def _print_phases(phases: Mapping[str, PhasePeak], requested: int, console: Console) -> None:
    if not phases:
        return
    table = table_of("phase", ("peak", "step"), ("", "mostly"))
    for name, phase in phases.items():
        categories = largest_first(phase.categories)
        mostly = categories[0][0] if categories else ""
        peak = phase.peak_bytes
        table.add_row(escape(name), format_bytes(peak), str(phase.step), bar(peak, requested), escape(mostly))
    console.print()
    console.print(table)
    steps = [(phase.step, phase.logical_step) for phase in phases.values()]
    console.print(steps_note(phases, steps), style="dim", highlight=False)


def _print_failures(failures: list[FailedAllocation], console: Console) -> None:
    if not failures:
        return
    last = failures[-1]
    where = f" for {last.module}" if last.module else ""
    more = f" ({len(failures)} allocations failed; this is the last)" if len(failures) > 1 else ""
    moment = describe_time(last.phase, last.step, last.logical_step)
    console.print(
        f"\n[red]out of memory:[/] {format_bytes(last.requested_bytes)} of {escape(last.category + where)} in "
        f"{escape(moment)}, with {format_bytes(last.live_bytes)} live{more}",
        highlight=False,
    )


def _print_reconciliation(peak: Peak, snapshots: list[DeviceSnapshot], console: Console) -> None:
    if remainder := peak.remainder_bytes:
        console.print(f"\n[red]Σ categories misses {remainder} bytes of the requested ones[/]", highlight=False)
    else:
        console.print("\n[green]Σ categories = requested bytes: exact[/]", highlight=False)
    _print_counted(peak, console)
    compared = [(snapshot.remainder, snapshot.name) for snapshot in snapshots if isinstance(snapshot.remainder, int)]
    wrong = [row for row in compared if row[0]]
    if wrong:
        worst, name = max(wrong, key=lambda row: abs(row[0]))
        console.print(
            f"[red]{len(wrong)} of {len(compared)} snapshots differ from what the allocator counts[/], "
            f'"{escape(name)}" by {worst} bytes',
            highlight=False,
        )
    elif compared:
        instants = format_count(len(compared), "snapshot")
        console.print(f"[green]and what the allocator itself counts, at {instants}: exact[/]", highlight=False)


def _print_counted(peak: Peak, console: Console) -> None:
    """Prints whether the allocator itself counted the same at the peak."""
    counted = peak.counted_bytes
    if counted is None:
        return
    excess = counted - peak.requested_bytes
    if excess == 0:
        console.print("[green]and what the allocator itself counts, at the peak: exact[/]", highlight=False)
    else:
        console.print(
            f"[yellow]the allocator itself counts {excess:+} bytes at the peak[/]: what the program has freed and a "
            "side stream still uses counts there",
            highlight=False,
        )
