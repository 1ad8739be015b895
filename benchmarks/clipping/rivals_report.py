# SPDX-License-Identifier: Apache-2.0
"""The results of rivals.py as Markdown, and as a picture in light and in dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import THEMES, Theme, label_bars, saved_figure

OUT_OF_MEMORY = "out of memory"
HEAD = "| mode | ms | time / vanilla | peak | peak / vanilla | clips exactly | by others |"
COLORS = {"Opacus and flash_clip": "#5c8ce3", "fastDP": "#d98b3a", "FlashNorm": "#6aa56e"}
OURS, SHARDED = "#1f4fa3", "#8f6bb8"


def markdown(results: dict[str, Any]) -> str:
    """The whole report: machine and versions, and one table for each configuration."""
    about = [f"{name} {value}" for name, value in {**results["machine"], **results["versions"]}.items() if value]
    lines = ["# Rivals", "", ", ".join(about), ""]
    lines += ["Small copies of the models, once, on the CPU: times say nothing.", ""] if results["tiny"] else []
    for config, paper in results["papers"].items():
        rows = [row for row in results["rows"] if row["config"] == config]
        if not rows:
            continue
        others = {each["mode"]: each for each in results["published"] if each["config"] == config}
        lines += [f"## {config}", "", f"Published on by: {paper}.", "", HEAD, "|---|---:|---:|---:|---:|---|---|"]
        lines += [_line(row, others.get(row["mode"])) for row in rows]
        shown = {row["mode"] for row in rows}
        lines += [
            f"| {mode} | - | - | - | - | - | {_other_result(other)} |"
            for mode, other in others.items()
            if mode not in shown
        ]
        lines.append("")
    return "\n".join(lines)


def failure(row: dict[str, Any]) -> str:
    """Why there are no times; "" if there are."""
    failed = "" if "seconds" in row else str(row["failed"])
    return OUT_OF_MEMORY if "OutOfMemoryError" in failed else failed


def label(row: dict[str, Any]) -> str:
    """What a row is called."""
    return f"{row['mode']}, {row['library']}" if row["library"].startswith("FSDP2") else str(row["mode"])


def _line(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    name = f"vanilla beside {row['library']}" if row["mode"] == "vanilla" else label(row)
    if failed := failure(row):
        figures = f"{_cell(failed)} | - | - | -"
    else:
        peak = "-" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
        figures = f"{1e3 * row['seconds']:.1f} | {_ratio(row['time_ratio'])} | {peak} | {_ratio(row['peak_ratio'])}"
    return f"| {name} | {figures} | {_exactness(row['exactness'])} | {_other_result(other)} |"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _exactness(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if "failed" in found:
        return _cell(found["failed"])
    if not found["wrong"]:
        return f"yes, to {found['error']:.0e} in {found['dtype']}"
    wrong, count = found["wrong"], found["parameters"]
    return f"no: {wrong} of {count} parameters, {found['worst']} by {found['error']:.0%}"


def _other_result(other: dict[str, Any] | None) -> str:
    if other is None:
        return "-"
    peak = "" if other["peak_ratio"] is None else f", peak {other['peak_ratio']:.2f} x"
    return f"{other['time_ratio']:.2f} x{peak} ({other['source']})"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def write_pictures(results: dict[str, Any], path: Path) -> list[Path]:
    """Draws ratios to training without privacy in light and in dark, `a.png` and `a-dark.png`. Returns the files."""
    files = {"light": path, "dark": path.with_name(f"{path.stem}-dark{path.suffix}")}
    configs = [c for c in results["papers"] if any(row["config"] == c for row in results["rows"])]
    shown = {c: [r for r in results["rows"] if r["config"] == c and r["mode"] != "vanilla"] for c in configs}
    heights = [1 + 0.32 * len(rows) for rows in shown.values()]
    has_peaks = any(row.get("peak_ratio") for rows in shown.values() for row in rows)
    panels = [("time_ratio", "time")] + ([("peak_ratio", "peak memory")] if has_peaks else [])
    for theme, file in files.items():
        with saved_figure(file, theme, (6.5 + 4 * len(panels), sum(heights) + 0.8)) as figure:
            device = "small copies on the CPU" if results["tiny"] else results["machine"]["device"]
            figure.suptitle(f"Relative to training without privacy, side by side; {device}", fontsize=11)
            grid = figure.subplots(len(configs), len(panels), squeeze=False, height_ratios=heights)
            for line, (config, rows) in zip(grid, shown.items(), strict=True):
                for axes, (key, title) in zip(line, panels, strict=True):
                    axes.set_title(f"{config}: {title}" if key == "time_ratio" else title)
                    _draw(axes, rows, key, THEMES[theme])
    return list(files.values())


def _draw(axes: Any, rows: list[dict[str, Any]], key: str, theme: Theme) -> None:
    ratios = [row.get(key) or 0.0 for row in rows]
    colors = [OURS if row["mode"] == "flash_clip" else COLORS.get(row["library"], SHARDED) for row in rows]
    axes.barh(range(len(rows)), ratios, color=colors, height=0.7)
    label_bars(axes, [label(row) for row in rows])
    axes.axvline(1, color=theme.accent, linewidth=1)
    reach = max([1.0, *ratios])
    axes.set_xlim(0, 1.3 * reach)
    for place, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
        wrong = row["exactness"] is not None and row["exactness"].get("wrong")
        text = f"{ratio:.2f}" if ratio else (OUT_OF_MEMORY if failure(row) == OUT_OF_MEMORY else "failed")
        text += ", not exact" if wrong else ""
        axes.text(ratio + 0.01 * reach, place, f" {text}", va="center", fontsize=8, color=theme.text)
