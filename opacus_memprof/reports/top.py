# SPDX-License-Identifier: Apache-2.0
"""Shows a running profile in a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from opacus_memprof.analysis.live import RunningDevice, RunningProfile
from opacus_memprof.analysis.profile_view import groups_of, parts_of
from opacus_memprof.profiles.profile import virtual_mark
from opacus_memprof.profiles.units import format_bytes, format_moment, shorten_name
from opacus_memprof.reports.text import bar, table_of

_TOP_MODULES = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_NEWEST_STEPS = 60  # in the trend's line
_STYLE = {"running": "cyan", "ended": "green", "killed": "red"}


def live_view(live: RunningProfile) -> RenderableType:
    """Renders a running profile, from analysis.live.ProfileFollower.read."""
    parts: list[RenderableType] = [
        Text.from_markup(
            f"[bold]opacus-memprof[/]  process {live.pid} [{_STYLE[live.status]}]{live.status}[/]  "
            f"step {live.step} (logical step {live.logical_step})  {escape(live.phase)}  "
            f"[dim]{live.events} events[/]"
        )
    ]
    if mark := virtual_mark(live.virtual):
        parts.append(Text(mark, "bold magenta"))
    if live.dropped:
        parts.append(
            Text(f"{live.dropped} events were lost: the disk is full or too slow, or the event file was full", "yellow")
        )
    if live.out_of_memory:
        parts.append(Text(f"{live.out_of_memory} allocations failed for want of memory", "red"))
    for name, device in live.devices.items():
        parts += ["", *_device(name, device)]
    if not live.devices:
        parts.append(Text("nothing is allocated yet", "dim"))
    return Group(*parts)


def _device(name: str, device: RunningDevice) -> list[RenderableType]:
    requested, peak = device.requested_bytes, device.peak_bytes
    parts: list[RenderableType] = [
        Text.from_markup(
            f"[bold]{escape(name)}[/]  {format_bytes(requested)} live  {bar(requested, peak)}  "
            f"peak {format_bytes(peak)} in step {device.peak_step}"
        )
    ]
    if device.reserved_peak is not None:
        reserved = device.reserved_peak
        moment = format_moment(reserved.phase, reserved.step)
        parts.append(Text(f"largest reserved {format_bytes(reserved.bytes)} in {moment}", "dim"))
    if trend := _trend(device.step_ends, device.bytes_per_step):
        parts.append(Text(trend, "dim"))
    if categories := parts_of(device.categories, requested):
        table = table_of("category", ("bytes", "share"), ("",))
        for part in categories:
            table.add_row(escape(part.name), part.size, part.share, bar(part.bytes, categories[0].bytes))
        parts += ["", table]
    named = {module: sizes for module, sizes in device.modules.items() if module}
    if modules := groups_of(named, requested, _TOP_MODULES):
        table = table_of("module", ("bytes", "share"), ("mostly",))
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
    growth = "steady" if slope == 0 else f"{'+' if slope > 0 else ''}{format_bytes(slope)} a step"
    return f"after each step  {line}  {growth}"
