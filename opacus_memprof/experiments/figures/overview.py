# SPDX-License-Identifier: Apache-2.0
"""The pictures of a sweep: the peak of every configuration, its growth with each size, and the parts of each peak.

The files are memory_analysis_overview.png, memory_heatmap.png, detailed_memory_analysis.png and
operation_level_breakdown.png.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.figures.bars import explain_labels, headline, height, labels, peaks
from opacus_memprof.experiments.rows import OPERATIONS, Line, Row, lines_over, memory_types, size_of, varied_sizes
from opacus_memprof.profiles.units import format_bytes, shorten_name
from opacus_memprof.reports.figures import (
    NAME,
    THEMES,
    Theme,
    byte_axis,
    category_color,
    category_label,
    legend,
    mixed,
    name_parts,
    saved_figure,
    stacked_bars,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_TITLES = {
    "seq_length": "Sequence length",
    "batch_size": "Batch size",
    "max_physical_batch_size": "Physical batch size",
    "lora_rank": "LoRA rank",
}
_TREND = 3.1  # inches, and for each line of its legends
_LEGEND_LINE = 0.19
_COLUMN = 1.15  # inches of a component
_NAME_LENGTH = 12  # characters of its name
_MARKERS = "osD^vPX*<>"
_STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))
# For each kind of memory, the colour of its most common category.
TYPE_COLORS = {
    "parameters": category_color("model_parameters"),
    "optimizer": category_color("optimizer_states"),
    "gradients": category_color("gradients"),
    "activations": category_color("activations"),
    "privacy": category_color("per_sample_gradients"),
    "temporaries": category_color("backward_temporaries"),
    "other": category_color("unattributed"),
}


def analysis_overview(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws every configuration's peak, and below it a panel for each size that varies."""
    varied = varied_sizes(rows)
    values = {size: sorted({size_of(row, size) for row in rows}) for size in varied}
    entries = max(
        (sum(1 + len(found) for other, found in values.items() if other != size) for size in varied), default=0
    )
    bars, trend = height(rows), _TREND + _LEGEND_LINE * entries
    with saved_figure(path, theme, (13, bars + (trend if varied else 0))) as figure:
        headline(figure, rows)
        explain_labels(figure, rows)
        parts = figure.subfigures(2, 1, height_ratios=(bars, trend), squeeze=False).flat if varied else [figure]
        upper, *lower = parts
        axes = upper.subplots()
        peaks(axes, rows, THEMES[theme])
        legend(upper, axes)
        for below in lower:
            panels = below.subplots(1, len(varied), sharey=True, squeeze=False)[0]
            for panel, size in zip(panels, varied, strict=True):
                others = {other: found for other, found in values.items() if other != size}
                _trend(panel, size, lines_over(size, rows), others, THEMES[theme])
            panels[0].set_ylabel("memory at the peak")


def _trend(axes: "Axes", size: str, lines: Sequence[Line], others: Mapping[str, Sequence[int]], theme: Theme) -> None:
    """Draws the memory over one size of the grid, such as the batch size: a line for each choice of the others.

    Shades tell the values of the size that has most of them, markers those of the next one, dashes those of the last.
    """
    ordered = sorted(others, key=lambda other: -len(others[other]))
    styles = {other: _line_styles(kind, others[other], theme) for other, kind in zip(ordered, _KINDS, strict=False)}
    values = sorted({value for line in lines for value, _ in line})
    position = {value: index for index, value in enumerate(values)}
    for line in lines:
        style: dict[str, Any] = {"color": theme.muted, "marker": "o", "linewidth": 1, "markersize": 4}
        for other, found in styles.items():
            style |= found[size_of(line[0][1], other)]
        sizes = [row.total_bytes for _, row in line]
        axes.plot([position[value] for value, _ in line], sizes, **style)
        for (value, row), reached in zip(line, sizes, strict=True):
            if not row.finished:
                axes.plot(position[value], reached, marker="x", markersize=10, color=theme.accent, linestyle="")
    axes.set_title(_TITLES[size])
    axes.set_xticks(range(len(values)), [_size_label(size, value) for value in values])
    axes.margins(x=0.15)
    largest = max((row.total_bytes for line in lines for _, row in line), default=0)
    axes.set_ylim(0, 1.1 * max(largest, 1))
    byte_axis(axes.yaxis, largest)
    _draw_legend(axes, styles, theme, failed=any(not row.finished for line in lines for _, row in line))


_KINDS = ("color", "marker", "linestyle")


def _line_styles(kind: str, values: Sequence[int], theme: Theme) -> dict[int, dict[str, Any]]:
    """Returns the styles of lines by a size's value."""
    if kind == "color":  # greys, because hues are for categories
        shades = [0.35 + 0.65 * index / max(len(values) - 1, 1) for index in range(len(values))]
        return {value: {"color": mixed(theme.grid, theme.text, s)} for value, s in zip(values, shades, strict=True)}
    choices = _MARKERS if kind == "marker" else _STYLES
    return {value: {kind: choices[index % len(choices)]} for index, value in enumerate(values)}


def _draw_legend(
    axes: "Axes", styles: Mapping[str, Mapping[int, dict[str, Any]]], theme: Theme, *, failed: bool
) -> None:
    """Draws a legend below the panel: the meanings of shades, markers and dashes."""
    from matplotlib.lines import Line2D

    entries: list[Line2D] = []
    for other, found in styles.items():
        entries.append(Line2D([], [], linestyle="", label=_TITLES[other]))
        for value, style in found.items():
            shown: dict[str, Any] = {"color": theme.muted, "linewidth": 1.5, **style}
            entries.append(Line2D([], [], label=_size_label(other, value), **shown))
    if failed:
        entries.append(Line2D([], [], linestyle="", marker="x", color=theme.accent, label="did not finish"))
    if entries:
        axes.legend(handles=entries, loc="upper center", bbox_to_anchor=(0.5, -0.1), handlelength=3)


def _size_label(size: str, value: int) -> str:
    return "full" if size == "lora_rank" and value == 0 else str(value)


Key = tuple[int, int, int, int]  # LoRA rank (0: none), logical batch, sequence length, physical batch


def rows_by_sizes(rows: Sequence[Row]) -> dict[Key, Row]:
    """Returns the rows by their sizes."""
    by_sizes = {}
    for row in rows:
        config = Configuration.from_json(dict(row.result.config))
        by_sizes[config.lora_rank or 0, config.batch_size, config.seq_length, config.physical_batch_size] = row
    return by_sizes


def memory_heatmap(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws a square for each configuration. Configurations that ran out of memory are hatched and have no colour."""
    cells = rows_by_sizes(rows)
    ranks, batches, lengths, physical = (sorted(set(axis)) for axis in zip(*cells, strict=True))
    finished = [row.total_bytes for row in rows if row.finished]
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(0, max(finished, default=1)), "cividis")
    width = 1.6 + len(batches) * (0.5 + 0.95 * len(physical))
    picture = (max(width, 4.5), max(1.1 + len(ranks) * (0.75 + 0.5 * len(lengths)), 3))
    with saved_figure(path, theme, picture) as figure:
        headline(figure, rows, "Memory at the peak")
        panels = figure.subplots(len(ranks), len(batches), sharex=True, sharey=True, squeeze=False)
        for line, rank in zip(panels, ranks, strict=True):
            for axes, batch in zip(line, batches, strict=True):
                adapters = f"LoRA rank {rank}" if rank else "full fine-tuning"
                axes.set_title(f"batch {batch}, {adapters}")
                for y, length in enumerate(lengths):
                    for x, part in enumerate(physical):
                        _square(axes, (x, y), cells.get((rank, batch, length, part)), scale, THEMES[theme])
                _label_axes(axes, physical, lengths)
        figure.supxlabel("physical batch size", fontsize=9)
        figure.supylabel("sequence length", fontsize=9)


def _square(axes: "Axes", place: tuple[int, int], row: Row | None, scale: Any, theme: Theme) -> None:
    from matplotlib.patches import Rectangle

    corner = (place[0] - 0.5, place[1] - 0.5)
    text, color = "", theme.muted
    if row is None:
        text = "not run"
    elif row.finished:
        red, green, blue, _ = shade = scale.to_rgba(row.total_bytes)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=shade))
        text = format_bytes(row.total_bytes)
        color = "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
    else:
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor=theme.grid, linewidth=0))
        text = row.outcome.replace("out of memory", "out of\nmemory")
        color = theme.accent
    axes.text(*place, text, ha="center", va="center", fontsize=8, color=color)


def _label_axes(axes: "Axes", physical: Sequence[int], lengths: Sequence[int]) -> None:
    axes.set_xlim(-0.5, len(physical) - 0.5)
    axes.set_ylim(-0.5, len(lengths) - 0.5)
    axes.set_xticks(range(len(physical)), [str(size) for size in physical])
    axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def detailed_analysis(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws the peaks by type of memory and by component, and the components of the largest peak.

    Components have a panel each, and the colours of categories: so a colour has one meaning.
    """
    largest = max(rows, key=lambda row: row.total_bytes)
    components = sorted(largest.components.items(), key=lambda item: -sum(item[1].values()))
    totals = Counter[str]()
    for row in rows:
        totals.update({name: sum(sizes.values()) for name, sizes in row.components.items()})
    names = [name for name, size in totals.most_common() if size]
    by_type = [memory_types(row.peak) if row.peak else {} for row in rows]
    upper, lower = height(rows) + 0.5, max(1.3 + 0.3 * len(components), height([largest]))
    with saved_figure(path, theme, (8 + _COLUMN * len(names), upper + lower)) as figure:
        headline(figure, rows, "Memory at the peak without rounding, by kind and by component")
        explain_labels(figure, rows)
        top, bottom = figure.subfigures(2, 1, height_ratios=(upper, lower), squeeze=False).flat
        widths = (4, *[_COLUMN] * len(names))
        axes, *panels = top.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
        bars = [name + _outcome(row) for name, row in zip(labels(rows), rows, strict=True)]
        highest = max((sum(sizes.values()) for row in rows for sizes in row.components.values()), default=1)
        for panel, name in zip(panels, names, strict=True):
            parts = [row.components.get(name, {}) for row in rows]
            texts = [format_bytes(sum(sizes.values())).removesuffix(" MB") if sizes else "" for sizes in parts]
            stacked_bars(panel, bars, parts, texts=texts)
            panel.set_title(shorten_name(name, _NAME_LENGTH), fontsize=9, gid=NAME)
            panel.set_xlim(0, 2.4 * max(highest, 1))  # one scale for all, and room for the texts
            panel.set_xlabel("MB")
            panel.set_xticks([])
            panel.tick_params(axis="y", length=0, labelleft=False)
        texts = [format_bytes(sum(sizes.values())) if sizes else "nothing was recorded" for sizes in by_type]
        stacked_bars(axes, bars, by_type, colors=TYPE_COLORS, texts=texts)
        axes.set_title("By kind of memory")
        if axes.patches:
            drawn = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / upper), ncols=4)
            name_parts(drawn.get_texts())
        legend(top, *panels)
        axes = bottom.subplots()
        stacked_bars(axes, [name for name, _ in components], [sizes for _, sizes in components])
        axes.set_title(f"Components of the largest peak ({largest.short_label}), by category")


def operation_breakdown(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws the live bytes at the highest instant within each operation, side by side."""
    names = [name + _outcome(row) for name, row in zip(labels(rows), rows, strict=True)]
    reached = [operation for operation in OPERATIONS if any(row.operation(operation) for row in rows)]
    sizes = {operation: [row.operation(operation) for row in rows] for operation in reached}
    highest = max((sum(parts.values()) for column in sizes.values() for parts in column), default=1)
    categories = {category for column in sizes.values() for parts in column for category in parts}
    figure_height = max(height(rows), 0.7 + 0.19 * len(categories)) + 0.4
    with saved_figure(path, theme, (15, figure_height)) as figure:
        headline(figure, rows, "The highest instant within each operation, without rounding, by category")
        explain_labels(figure, rows)
        panels = figure.subplots(1, max(len(reached), 1), sharex=True, sharey=True, squeeze=False)[0]
        for axes, operation in zip(panels, reached, strict=False):
            texts = [format_bytes(sum(parts.values())) if parts else "not reached" for parts in sizes[operation]]
            stacked_bars(axes, names, sizes[operation], texts=texts)
            axes.set_title(category_label(operation))
        panels[0].set_xlim(0, 1.5 * highest)
        for axes in panels:
            byte_axis(axes.xaxis, highest, ticks=2)
        legend(figure, *panels)


def _outcome(row: Row) -> str:
    """Returns the suffix of a label: "" for a run that finished."""
    return "" if row.finished else " (OOM)" if row.ran_out_of_memory else f" ({row.outcome})"
