# SPDX-License-Identifier: Apache-2.0
"""Prints the DP tax to a terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from opacus_memprof.profiles.difference import Tax
from opacus_memprof.profiles.units import format_bytes, format_signed_bytes
from opacus_memprof.reports.diff import largest_changes
from opacus_memprof.reports.text import table_of

_TOP_MODULES = 9


def print_tax(tax: Tax, console: Console) -> None:
    """Prints the DP tax of each device."""
    for name, device in tax.devices.items():
        console.print(
            f"[bold]{escape(name)}[/]: privacy takes [bold]{format_signed_bytes(device.total)}[/] at the peak: "
            f"{format_bytes(device.private_bytes)} with it, {format_bytes(device.vanilla_bytes)} without",
            highlight=False,
        )
        _print_table("category", device.categories, console)
        modules = {module: sum(sizes.values()) for module, sizes in device.modules.items()}
        _print_table("module", modules, console, _TOP_MODULES)
        if device.opacus_only:
            size = format_bytes(device.opacus_only)
            console.print(f"\n{size} of captured activations are held by Opacus alone", highlight=False)
    for note in tax.notes:
        console.print(f"\n[yellow]note:[/] {escape(note)}", highlight=False)


def _print_table(title: str, sizes: Mapping[str, int], console: Console, top: int | None = None) -> None:
    """Prints the first `top` differences (default: all), the largest first, and the sum of the others."""
    rows = largest_changes(sizes)
    if not rows:
        return
    table = table_of(title, ("difference",), ())
    for name, size in rows[:top]:
        table.add_row(escape(name) or "(no module)", format_signed_bytes(size))
    if rest := rows[len(rows) if top is None else top :]:
        table.add_row(f"{len(rest)} more", format_signed_bytes(sum(size for _, size in rest)), style="dim")
    console.print()
    console.print(table)
