# SPDX-License-Identifier: Apache-2.0
"""memory_heatmap.png: the peak over sequence length and physical batch, for each logical batch and LoRA rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.rows import Row
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import saved_figure
from opacus_memprof.reports.palette import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        figure.suptitle("Memory at the peak", fontweight="bold")
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
