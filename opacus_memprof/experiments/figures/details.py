# SPDX-License-Identifier: Apache-2.0
"""detailed_memory_analysis.png and operation_level_breakdown.png: components, kinds of memory, and operations."""

from collections.abc import Sequence
from pathlib import Path

from opacus_memprof.experiments.figures.bars import headline, height, labels
from opacus_memprof.experiments.rows import OPERATIONS, Row, memory_types
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import byte_axis, category_label, legend, saved_figure, stacked_bars
from opacus_memprof.reports.palette import category_color

# Okabe and Ito's colours, which people with colour vision deficiencies can distinguish, and three more.
COMPONENT_COLORS = {
    "embedding": "#0072b2",
    "attention": "#e69f00",
    "mlp": "#009e73",
    "norm": "#cc79a7",
    "lora": "#d55e00",
    "head": "#56b4e9",
    "conv": "#f0e442",
    "recurrent": "#8c6d31",
    "block": "#7b6fd0",
    "other": "#8e8d96",
}
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


def detailed_analysis(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws the peaks by component and by type of memory, and the components of the largest peak by category."""
    largest = max(rows, key=lambda row: row.total_bytes)
    components = sorted(largest.components.items(), key=lambda item: -sum(item[1].values()))
    by_component = [{name: sum(sizes.values()) for name, sizes in row.components.items()} for row in rows]
    by_type = [memory_types(row.peak) if row.peak else {} for row in rows]
    upper, lower = height(rows) + 0.5, max(1.3 + 0.3 * len(components), height([largest]))
    with saved_figure(path, theme, (13, upper + lower)) as figure:
        headline(figure, rows)
        top, bottom = figure.subfigures(2, 1, height_ratios=(upper, lower), squeeze=False).flat
        left, right = top.subplots(1, 2, sharey=True)
        names = [name + _outcome(row) for name, row in zip(labels(rows), rows, strict=True)]
        for axes, title, parts, colors in (
            (left, "Memory at the peak without rounding, by component", by_component, COMPONENT_COLORS),
            (right, "By kind of memory", by_type, TYPE_COLORS),
        ):
            texts = [format_bytes(sum(sizes.values())) if sizes else "nothing was recorded" for sizes in parts]
            stacked_bars(axes, names, parts, colors=colors, texts=texts)
            axes.set_title(title)
            if axes.patches:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / upper), ncols=4)
        axes = bottom.subplots()
        stacked_bars(axes, [name for name, _ in components], [sizes for _, sizes in components])
        axes.set_title(f"Components of the largest peak ({largest.short_label}), by category")
        legend(bottom, axes)


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
