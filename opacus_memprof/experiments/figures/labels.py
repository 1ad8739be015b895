# SPDX-License-Identifier: Apache-2.0
"""Places the labels of points in a picture so that they do not cover one another."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# The positions of a label relative to its point, in points (1/72 inch); the first free one is used.
_BESIDE = [(9, 0, "left"), (-9, 0, "right"), (0, 22, "center"), (0, -22, "center")]
_AWAY = [(dx, dy, "left" if dx > 0 else "right") for dy in (20, -20, 40, -40, 60, -60, 80, -80) for dx in (12, -12)]
_DOT = 6  # half the width of a point, in points


def place_labels(axes: "Axes", x: Sequence[float], y: Sequence[float], labels: Sequence[str]) -> None:
    """Labels points. A label that is not next to its point gets a line to it."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # text has no size before
    inside = axes.get_window_extent()
    pad = _DOT * axes.figure.dpi / 72
    points = list(zip(x, y, strict=True))
    occupied = [
        Bbox.from_extents(px - pad, py - pad, px + pad, py + pad) for px, py in map(axes.transData.transform, points)
    ]
    for point, label in zip(points, labels, strict=True):

        def cost(
            place: tuple[int, int, str], point: tuple[float, float] = point, label: str = label
        ) -> tuple[bool, int]:
            text = _label(axes, point, label, place)
            box = text.get_window_extent()
            text.remove()
            return not _is_within(box, inside), sum(box.overlaps(other) for other in occupied)

        best = min([*_BESIDE, *_AWAY], key=cost)
        occupied.append(_label(axes, point, label, best).get_window_extent())


def _is_within(box: "Bbox", outer: "Bbox") -> bool:
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)


def _label(axes: "Axes", point: tuple[float, float], label: str, place: tuple[int, int, str]) -> "Annotation":
    dx, dy, side = place
    return axes.annotate(
        label,
        point,
        (dx, dy),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=8,
        arrowprops={"arrowstyle": "-", "linewidth": 0.6} if dx and dy else None,
    )
