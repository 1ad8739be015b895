# SPDX-License-Identifier: Apache-2.0
"""Results as text and as a LaTeX table. MB are 2**20 bytes, as in the JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opacus_memprof.experiments.grid import LABELS
from opacus_memprof.experiments.rows import MB, OPERATIONS, Row, difference, vanilla_of
from opacus_memprof.profiles.categories import PRIVATE
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.latex import escape

_WIDE, _NARROW = 104, 80
_FEW = 6  # runs, up to which a terminal shows all of each
_TOP = 3  # findings


def line(row: Row) -> str:
    """What became of a run, in a line."""
    words = [row.outcome]
    if row.peak:
        words.append(f"peak {format_bytes(row.total)} in {row.peak['phase']}")
    if row.milliseconds is not None:
        words.append(f"{row.milliseconds:.3g} ms a step")
    if failed := row.failed_allocation:
        words.append(f"{format_bytes(failed['requested_bytes'])} more for {failed['category']} did not fit")
    why = f": {row.result['error']}" if row.result["error"] and not row.failed_allocation else ""
    return ", ".join(words) + why


def text(rows: Sequence[Row]) -> str:
    """summary.txt: a line for each run, findings, why memory ran out, and the parts of each one's peak."""
    return _joined(rows, rows, "")


def closing(rows: Sequence[Row], directory: Path) -> str:
    """The same for a terminal, with paths as they are seen from there; of many runs the parts of the largest alone."""
    shown = rows if len(rows) <= _FEW else [max(rows, key=lambda row: row.total)]
    return _joined(rows, shown, f"{directory}/")


def _joined(rows: Sequence[Row], shown: Sequence[Row], root: str) -> str:
    vanilla = vanilla_of(rows)
    lines = [*_overview(rows), "", *_findings(rows), *_failures(rows, root), "COMPONENT-LEVEL BREAKDOWN:", ""]
    for row in shown:
        lines += [f"{row.label}:", "-" * _NARROW, *_breakdown(row, vanilla), *_components(row), *_stages(row), ""]
    return "\n".join([*lines, *_conditions(rows)]) + "\n"


def _overview(rows: Sequence[Row]) -> list[str]:
    wide = max(30, *(len(row.label) + 2 for row in rows))
    lines = ["=" * _WIDE, "SUMMARY", "=" * _WIDE, ""]
    heading = "Method" if rows[0].label.startswith(LABELS[rows[0].mode]) else "Configuration"
    lines.append(f"{heading:<{wide}}{'Peak Memory (MB)':>20}{'Avg Time (ms)':>22}{'Memory/Time':>20}")
    lines.append("-" * _WIDE)
    for row in rows:
        peak = f"{row.total / MB:.2f}" if row.total else "-"
        if row.finished and row.milliseconds:
            times = f"{row.milliseconds:>22.2f}{_ratio(row.total / MB / row.milliseconds):>20}"
        else:
            times = f"{row.outcome:>22}{'-':>20}"
        lines.append(f"{row.label:<{wide}}{peak:>20}{times}")
    return [*lines, "=" * _WIDE]


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _findings(rows: Sequence[Row]) -> list[str]:
    """The largest of each kind, the first few kinds, and the runs that have them."""
    kinds: dict[str, list[tuple[Mapping[str, Any], Row]]] = {}
    for row in rows:
        for finding in row.findings:
            kinds.setdefault(finding["kind"], []).append((finding, row))
    largest = [max(found, key=lambda one: one[0]["bytes"]) for found in kinds.values()]
    largest.sort(key=lambda one: -one[0]["bytes"])
    lines = ["TOP FINDINGS:", ""] if largest else []
    for finding, row in largest[:_TOP]:
        where = f" in {finding['module']}" if finding["module"] else ""
        others = len({other.name for _, other in kinds[finding["kind"]]}) - 1
        runs = f"{row.short}, and {others} more" if others else row.short
        lines.append(f"{finding['kind'].replace('_', ' ')}{where}, {format_bytes(finding['bytes'])} ({runs})")
        lines += [*_wrapped("evidence", finding["evidence"]), *_wrapped("remedy", finding["remedy"]), ""]
    return lines


def _failures(rows: Sequence[Row], root: str) -> list[str]:
    failed = [row for row in rows if row.failed_allocation is not None]
    lines = ["OUT OF MEMORY:", ""] if failed else []
    for row in failed:
        lines.append(f"{row.label}: {line(row)}")
        if best := row.result.get("oom_suggestion"):
            fits = {True: ", which fits", False: ", not enough alone", None: ""}[best["fits"]]
            lines.append(
                f"  suggestion: {best['title']} (predicted peak {format_bytes(best['predicted_peak_bytes'])}{fits})"
            )
            lines += [f"    {code}" for code in best["code"].splitlines()]
        if row.oom_report:
            lines.append(f"  report: {root}{row.oom_report}")
        lines.append("")
    return lines


def _wrapped(title: str, words: str) -> list[str]:
    return textwrap.wrap(words, _WIDE, initial_indent=f"  {title}: ", subsequent_indent="    ", break_on_hyphens=False)


def _components(row: Row) -> list[str]:
    sizes = {name: sum(parts.values()) for name, parts in row.components.items()}
    lines = [f"    {name:<42}{size / MB:>16.2f} MB" for name, size in sorted(sizes.items(), key=lambda one: -one[1])]
    return ["", "  By component:", *lines] if lines else []


def _stages(row: Row) -> list[str]:
    """Set-up's stages, each with its own peak and what it leaves, and the training's operations."""
    found: list[tuple[str, int | None, int | None]] = list(row.set_up)
    found += [(name, row.operation_peak(name), None) for name in OPERATIONS if row.operation(name)]
    lines = []
    for name, peak, after in found:
        left = "" if after is None else f"{after / MB:>16.2f} MB"
        lines.append(
            f"    {name.replace('_', ' '):<42}" + ("-".rjust(19) if peak is None else f"{peak / MB:>16.2f} MB") + left
        )
    return ["", f"  {'By stage:':<44}{'peak':>19}{'live after it':>19}", *lines] if lines else []


def _breakdown(row: Row, vanilla: Row | None) -> list[str]:
    lines = []
    more = {} if vanilla is None or vanilla is row or not row.finished else difference(row, vanilla)
    for category, size in sorted(row.bytes.items(), key=lambda item: -item[1]):
        mark = ""
        change = more.get(category, 0)
        if more and category == "activation_hooks" and row.shared_captures:
            mark = f"  <- captured for DP-SGD; autograd holds {row.shared_captures / MB:.2f} MB of it anyway"
        elif change and category in PRIVATE:
            mark = "  <- DP-SGD only"
        elif round(change / MB, 2):
            mark = f"  <- {change / MB:+.2f} MB against vanilla"
        lines.append(f"  {_title(category):<44}{size / MB:>16.2f} MB{mark}")
    if more:
        lines.append(f"  {'All, against vanilla':<44}{sum(more.values()) / MB:>+16.2f} MB")
    if not row.finished:
        lines.append(f"  {row.outcome}: {row.result['error']}")
    if failed := row.failed_allocation:
        lines.append(f"  {'In use when memory ran out':<44}{failed['live_bytes'] / MB:>16.2f} MB")
        lines.append(f"  {'Wanted beyond that':<44}{row.refused_bytes / MB:>16.2f} MB")
    return lines or ["  nothing was recorded"]


def _conditions(rows: Sequence[Row]) -> list[str]:
    """What all of them ran on, and with; what differs is in the JSON files."""
    lines = []
    for title, values in (
        ("Device", [row.result["environment"]["device_name"] for row in rows]),
        ("torch", [row.result["environment"]["torch"] for row in rows]),
        ("Opacus", [row.result["environment"]["opacus"] for row in rows]),
        ("Model", [row.result["config"]["model"] for row in rows]),
        ("Sequence length", [row.result["config"]["seq_length"] for row in rows]),
        ("Batch size", [row.result["config"]["batch_size"] for row in rows]),
        ("dtype", [row.result["config"]["dtype"] for row in rows]),
        ("Data", [(row.result["data"] or {}).get("source") for row in rows]),
    ):
        known = dict.fromkeys(str(value) for value in values if value is not None)
        lines.append(f"{title}: {', '.join(known) or 'unknown'}")
    return [*lines, "MB are 2**20 bytes. Each breakdown is that of one instant, the run's own peak."]


def latex(rows: Sequence[Row]) -> str:
    """A table for a paper; needs the package booktabs."""
    vanilla = vanilla_of(rows)
    lines = []
    for row in rows:
        cells = [escape(row.label), f"{row.total / MB:.2f}" if row.total else "--"]
        if not row.finished:
            cells += [r"\multicolumn{3}{c}{" + escape(row.outcome) + "}"]
        else:
            time = row.milliseconds
            base = vanilla.milliseconds if vanilla else None
            cells.append("--" if vanilla is None else f"{100 * (row.total / vanilla.total - 1):+.1f}")
            cells.append("--" if time is None else f"{time:.2f}")
            cells.append("--" if time is None or not base else f"{time / base:.2f}")
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"\begin{tabular}{lrrrr}",
            r"\toprule",
            r"Method & Peak (MiB) & Overhead (\%) & Step (ms) & Time / vanilla \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _title(category: str) -> str:
    return category.replace("_", " ").title()
