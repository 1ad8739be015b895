# SPDX-License-Identifier: Apache-2.0
"""Writes LaTeX tables for a paper, in the style of the booktabs package."""

import os
from collections.abc import Iterable, Sequence

from opacus_memprof.analysis.profile_view import DeviceView, Part, ProfileView
from opacus_memprof.profiles.files import write_text

_ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_TRANSLATION = str.maketrans(_ESCAPED)


def escape(text: str) -> str:
    """Escapes text for a paragraph of LaTeX."""
    return " ".join(text.split()).translate(_TRANSLATION)


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a `table` environment, with text in the first column and all cells escaped."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"\toprule",
        _line(header),
        r"\midrule",
        *map(_line, rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(escape, cells)) + r" \\"


def write_latex(view: ProfileView, path: str | os.PathLike[str]) -> None:
    """Writes three tables for each device: the peak by category, by module, and the peak of each phase.

    Raises:
        MemprofError: `path` cannot be written.
    """
    tables = [text for device in view.devices.values() for text in _tables(device)]
    head = "% \\usepackage{booktabs} goes into the preamble.\n"
    write_text(path, "\n".join([head, *tables]))


def _tables(view: DeviceView) -> list[str]:
    total = ("total", view.peak_size, "100.0%" if view.device.peak.requested_bytes else "")
    tables = [
        table(
            f"Requested memory at the peak of {view.title}, {view.peak_size} in {view.peak_moment}, by category",
            ("Category", "Memory", "Share"),
            [*map(_row, view.categories), total],
        )
    ]
    if view.modules:
        tables.append(
            table(f"The same by module: {view.title}", ("Module", "Memory", "Share"), map(_row, view.modules))
        )
    phases = [(row.name, row.size, str(row.step)) for row in view.phases]
    tables.append(
        table(f"Requested memory of {view.title} at the peak of each phase", ("Phase", "Memory", "Step"), phases)
    )
    return tables


def _row(part: Part) -> tuple[str, str, str]:
    return part.name or "(no module)", part.size, part.share.replace(" ", "")
