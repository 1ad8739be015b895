# SPDX-License-Identifier: Apache-2.0
"""detailed_memory_analysis.png and operation_level_breakdown.png: components, kinds of memory, and operations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opacus_memprof.experiments.sweep.bars import height, mark_failures, name_bars, say_of_nothing
from opacus_memprof.experiments.sweep.memory_types import memory_types
from opacus_memprof.experiments.sweep.reading import Result, label, outcome, peak_bytes
from opacus_memprof.experiments.sweep.tables import OPERATIONS
from opacus_memprof.reports.figures import byte_axis, category_label, drawn, legend, stacked_bars
from opacus_memprof.reports.palette import THEMES, category_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart also without colours of their own names: Okabe and Ito's, for who sees colours differently.
COMPONENT_COLORS = {
    "embedding": "#0072b2",
    "attention": "#e69f00",
    "mlp": "#009e73",
    "norm": "#cc79a7",
    "lora": "#d55e00",
    "head": "#56b4e9",
    "conv": "#f0e442",
    "recurrent": "#8c6d31",
    "other": "#8e8d96",
}
# Of each kind of memory, the colour of its most common category.
TYPE_COLORS = {
    "parameters": category_color("model_parameters"),
    "optimizer": category_color("optimizer_states"),
    "gradients": category_color("gradients"),
    "activations": category_color("activations"),
    "privacy": category_color("per_sample_gradients"),
    "temporaries": category_color("backward_temporaries"),
    "other": category_color("unattributed"),
}


def component_bytes(result: Result) -> dict[str, int]:
    """By component, at the peak."""
    peak = result["peak"]
    return {} if peak is None else {name: sum(sizes.values()) for name, sizes in peak["components"].items()}


def operation_bytes(result: Result, operation: str) -> dict[str, int]:
    """By category, at the highest instant within an operation; empty where it was not reached."""
    found = result["phases"].get(operation)
    return {} if found is None else dict(found["categories"])


def draw_details(results: Mapping[str, Result], path: Path, theme: str) -> None:
    """The peaks by component and by kind of memory; and the components of the largest peak by category."""
    rows = list(results.values())
    largest = max(rows, key=lambda result: peak_bytes(result) or 0)
    components = {} if largest["peak"] is None else largest["peak"]["components"]
    upper, lower = height(len(rows)) + 0.5, height(len(components))
    with drawn(path, theme, (13, upper + lower)) as figure:
        top, bottom = figure.subfigures(2, 1, height_ratios=(upper, lower), squeeze=False).flat
        left, right = top.subplots(1, 2, sharey=True)
        names = [label(result) for result in rows]
        by_component = [component_bytes(result) for result in rows]
        _stack(left, names, by_component, COMPONENT_COLORS)
        left.set_title("Memory at the peak, by component")
        by_type = [{} if result["peak"] is None else memory_types(result["peak"]) for result in rows]
        _stack(right, names, by_type, TYPE_COLORS)
        right.set_title("By kind of memory")
        for axes in (left, right):
            mark_failures(axes, rows, THEMES[theme], words=False)
        axes = bottom.subplots()
        ordered = sorted(components, key=lambda name: -sum(components[name].values()))
        stacked_bars(axes, ordered, [components[name] for name in ordered], horizontal=True)
        axes.set_title(f"Components of the largest peak ({label(largest)}), by category")
        legend(bottom, axes)


def draw_operations(results: Mapping[str, Result], path: Path, theme: str) -> None:
    """What was live at the highest instant within each operation, side by side."""
    rows = list(results.values())
    names = [label(result) + outcome(result) for result in rows]
    operations = [operation for operation in OPERATIONS if any(operation_bytes(result, operation) for result in rows)]
    with drawn(path, theme, (15, height(len(rows)) + 0.4)) as figure:
        figure.suptitle("The highest instant within each operation, by category", fontweight="bold")
        panels = figure.subplots(1, max(len(operations), 1), sharex=True, sharey=True, squeeze=False)[0]
        for axes, operation in zip(panels, operations, strict=False):
            sizes = [operation_bytes(result, operation) for result in rows]
            stacked_bars(axes, names, sizes, horizontal=True)
            name_bars(axes, names)
            say_of_nothing(axes, sizes, "not reached")
            axes.set_title(category_label(operation))
        every = [operation_bytes(result, operation) for result in rows for operation in operations]
        highest = max((sum(sizes.values()) for sizes in every), default=1)
        for axes in panels:
            byte_axis(axes.xaxis, highest, ticks=3)
        panels[0].set_xlim(0, 1.4 * highest)
        legend(figure, *panels)


def _stack(axes: "Axes", names: Sequence[str], rows: Sequence[Mapping[str, int]], colors: Mapping[str, str]) -> None:
    """Horizontal bars of the parts that have a colour here, in its order, with a legend below."""
    ends = [0] * len(rows)
    for part, color in colors.items():
        sizes = [row.get(part, 0) for row in rows]
        if any(sizes):
            axes.barh(range(len(rows)), sizes, left=ends, color=color, label=part)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    name_bars(axes, names)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    byte_axis(axes.xaxis, max(ends, default=0))
    if any(ends):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / height(len(names))), ncols=4)
