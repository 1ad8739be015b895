# SPDX-License-Identifier: Apache-2.0
"""Tables in a terminal, and the texts of their cells."""

from collections.abc import Mapping

from rich.table import Table

from opacus_memprof.profiles.units import format_bytes

_BAR = 20  # characters of the longest bar


def table_of(name: str, numbers: tuple[str, ...], words: tuple[str, ...]) -> Table:
    """A table without borders: a first column `name`, columns of numbers, columns of words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name, overflow="ellipsis", no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for column in words:
        table.add_column(column, no_wrap=True)
    return table


def bar(part: int, whole: int) -> str:
    """A bar of eighths of a character, at most _BAR characters long."""
    eighths = max(0, min(round(8 * _BAR * part / whole), 8 * _BAR)) if whole else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def share(part: int, whole: int) -> str:
    """A part in percent: `12.3 %`; "" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The items with the largest size first, without zeros."""
    return sorted(((key, size) for key, size in sizes.items() if size), key=lambda item: (-item[1], item[0]))


def largest_changes(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The items with the largest absolute size first, without zeros."""
    return sorted((row for row in sizes.items() if row[1]), key=lambda row: (-abs(row[1]), row[0]))


def signed_bytes(size: int) -> str:
    """A size with its sign: `+1.50 MiB`."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def shorten_name(name: str, length: int = 36) -> str:
    """A module's name, of which at most the last `length` characters are kept."""
    return name if len(name) <= length else "…" + name[-(length - 1) :]
