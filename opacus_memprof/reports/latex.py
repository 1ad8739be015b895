# SPDX-License-Identifier: Apache-2.0
"""Writes LaTeX tables for a paper, in the style of the booktabs package."""

import os
from collections.abc import Iterable, Sequence

from opacus_memprof.analysis.virtual import virtual_gpu_of
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Device, Profile
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.moments import describe_time
from opacus_memprof.reports.tables import largest_first

_TOP_MODULES = 10
_ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_TRANSLATION = str.maketrans(_ESCAPED)


def escape(text: str) -> str:
    """Text that LaTeX prints as it is, within a paragraph."""
    return " ".join(text.split()).translate(_TRANSLATION)


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A `table` environment: the first column is text, the others are aligned to the right. Everything is escaped."""
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


def write_latex(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes three tables for each device: the peak by category, by module, and the peak of each phase.

    Raises:
        MemprofError: `path` cannot be written.
    """
    virtual = virtual_gpu_of(profile.virtual)
    names = {name: name if virtual is None else f"{name}, a {virtual}" for name in profile.devices}
    tables = [text for name, device in profile.devices.items() for text in _tables(names[name], device)]
    head = "% \\usepackage{booktabs} goes into the preamble.\n"
    write_text(path, "\n".join([head, *tables]))


def _tables(name: str, device: Device) -> list[str]:
    peak = device.peak
    whole = peak.requested_bytes
    highest = f"{format_bytes(whole)} in {describe_time(peak.phase, peak.step, peak.logical_step)}"
    categories = largest_first(peak.categories)
    tables = [
        table(
            f"Requested memory at the peak of {name}, {highest}, by category",
            ("Category", "Memory", "Share"),
            [*(_row(category, size, whole) for category, size in categories), _row("total", whole, whole)],
        )
    ]
    modules = largest_first({module: sum(sizes.values()) for module, sizes in peak.modules.items()})
    if modules:
        rows = [_row(module or "(no module)", size, whole) for module, size in modules[:_TOP_MODULES]]
        if rest := modules[_TOP_MODULES:]:
            rows.append(_row(f"{len(rest)} more", sum(size for _, size in rest), whole))
        tables.append(table(f"The same by module: {name}", ("Module", "Memory", "Share"), rows))
    phases = [(phase, format_bytes(moment.peak_bytes), str(moment.step)) for phase, moment in device.phases.items()]
    tables.append(table(f"Requested memory of {name} at the peak of each phase", ("Phase", "Memory", "Step"), phases))
    return tables


def _row(name: str, size: int, whole: int) -> tuple[str, str, str]:
    return name, format_bytes(size), f"{100 * size / whole:.1f}%" if whole else ""
