# SPDX-License-Identifier: Apache-2.0
"""Tables in a terminal, and the texts of their cells."""

from collections.abc import Mapping

from rich.table import Table

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


def largest_changes(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The items with the largest absolute size first, without zeros."""
    return sorted((row for row in sizes.items() if row[1]), key=lambda row: (-abs(row[1]), row[0]))
