# SPDX-License-Identifier: Apache-2.0
"""Results as text and as a LaTeX table. MB are 2**20 bytes, as in the JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.experiments.comparison import Method, difference, vanilla_of
from opacus_memprof.profiles.categories import PRIVATE
from opacus_memprof.reports.latex import escape
from opacus_memprof.units import format_bytes

MB = 2**20
_WIDE, _NARROW = 104, 80


def told(result: Mapping[str, Any]) -> str:
    """One result in a line."""
    method = Method(result["experiment"], result)
    time = "" if method.milliseconds is None else f", {method.milliseconds:.1f} ms a step"
    said = f"{method.label}: {method.outcome}, {format_bytes(method.total)} at the peak{time}"
    if method.ran_out:
        steps = result["progress"]["steps_completed"]
        said = (
            f"{method.label}: out of memory after {steps} steps, with {format_bytes(method.total)} in use and "
            f"{format_bytes(method.refused_bytes)} more wanted"
        )
    return said if method.finished else f"{said}\n  {result['error']}"


def text(compared: Sequence[Method]) -> str:
    """summary.txt: a line for each method, then the categories at each one's peak, largest first."""
    lines = ["=" * _WIDE, "SUMMARY", "=" * _WIDE, ""]
    lines.append(f"{'Method':<30}{'Peak Memory (MB)':>20}{'Avg Time (ms)':>22}{'Memory/Time':>20}")
    lines.append("-" * _WIDE)
    for method in compared:
        peak = f"{method.total / MB:.2f}" if method.total else "-"
        if method.finished and method.milliseconds:
            times = f"{method.milliseconds:>22.2f}{method.total / MB / method.milliseconds:>20.2f}"
        else:
            times = f"{method.outcome:>22}{'-':>20}"
        lines.append(f"{method.label:<30}{peak:>20}{times}")
    lines += ["=" * _WIDE, "", "COMPONENT-LEVEL BREAKDOWN:", ""]
    vanilla = vanilla_of(compared)
    for method in compared:
        lines += [f"{method.label}:", "-" * _NARROW, *_breakdown(method, vanilla), ""]
    lines += _conditions(compared)
    return "\n".join(lines) + "\n"


def _breakdown(method: Method, vanilla: Method | None) -> list[str]:
    lines = []
    more = {} if vanilla is None or vanilla is method or not method.finished else difference(method, vanilla)
    for category, size in sorted(method.bytes.items(), key=lambda item: -item[1]):
        mark = ""
        change = more.get(category, 0)
        if more and category == "activation_hooks" and method.shared_captures:
            mark = f"  <- captured for DP-SGD; autograd holds {method.shared_captures / MB:.2f} MB of it anyway"
        elif change and category in PRIVATE:
            mark = "  <- DP-SGD only"
        elif round(change / MB, 2):
            mark = f"  <- {change / MB:+.2f} MB against vanilla"
        lines.append(f"  {_title(category):<44}{size / MB:>16.2f} MB{mark}")
    if more:
        lines.append(f"  {'All, against vanilla':<44}{sum(more.values()) / MB:>+16.2f} MB")
    if not method.finished:
        lines.append(f"  {method.outcome}: {method.result['error']}")
    if method.refused_bytes:
        lines.append(f"  {'Wanted beyond that':<44}{method.refused_bytes / MB:>16.2f} MB")
    return lines or ["  nothing was recorded"]


def _conditions(compared: Sequence[Method]) -> list[str]:
    """What all of them ran on, and with; what differs is in the JSON files."""
    lines = []
    for title, values in (
        ("Device", [method.result["environment"]["device_name"] for method in compared]),
        ("torch", [method.result["environment"]["torch"] for method in compared]),
        ("Opacus", [method.result["environment"]["opacus"] for method in compared]),
        ("Model", [method.result["config"]["model"] for method in compared]),
        ("Sequence length", [method.result["config"]["seq_length"] for method in compared]),
        ("Batch size", [method.result["config"]["batch_size"] for method in compared]),
        ("dtype", [method.result["config"]["dtype"] for method in compared]),
        ("Data", [(method.result["data"] or {}).get("source") for method in compared]),
    ):
        known = dict.fromkeys(str(value) for value in values if value is not None)
        lines.append(f"{title}: {', '.join(known) or 'unknown'}")
    return [*lines, "MB are 2**20 bytes. Each breakdown is that of one instant, the method's own peak."]


def latex(compared: Sequence[Method]) -> str:
    """A table for a paper; needs the package booktabs."""
    vanilla = vanilla_of(compared)
    rows = []
    for method in compared:
        cells = [escape(method.label), f"{method.total / MB:.2f}" if method.total else "--"]
        if not method.finished:
            cells += [r"\multicolumn{3}{c}{" + escape(method.outcome) + "}"]
        else:
            time = method.milliseconds
            base = vanilla.milliseconds if vanilla else None
            cells.append("--" if vanilla is None else f"{100 * (method.total / vanilla.total - 1):+.1f}")
            cells.append("--" if time is None else f"{time:.2f}")
            cells.append("--" if time is None or not base else f"{time / base:.2f}")
        rows.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"\begin{tabular}{lrrrr}",
            r"\toprule",
            r"Method & Peak (MB) & Overhead (\%) & Step (ms) & Time / vanilla \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _title(category: str) -> str:
    return category.replace("_", " ").title()
