# SPDX-License-Identifier: Apache-2.0
"""Parts of all pictures: colours, figures in two themes, saved atomically; axes in bytes; stacks by category.

HTML pages have the same colours. matplotlib's Agg canvas draws into files, without a display, pyplot or global state.
"""

import contextlib
import functools
import logging
import math
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from opacus_memprof.errors import require
from opacus_memprof.language import current_language, tr, tr_sentence
from opacus_memprof.profiles.categories import CATEGORIES, stack_order
from opacus_memprof.profiles.files import replacing
from opacus_memprof.profiles.units import MEGABYTE_NOTE, format_bytes, in_megabytes, shorten_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.text import Text


CATEGORY_COLORS = {category.name: category.color for category in CATEGORIES} | {
    # bytes beyond the requested ones
    "rounding": "#a9adb3",
    "cached": "#c3c7cc",
    "outside_pytorch": "#d9dce0",
}

# Phases are greys with letters: hues are for categories. Idle has none.
PHASE_COLORS = {
    "setup": "#dfe3e8",
    "forward": "#b8c0ca",
    "backward": "#6f7a87",
    "second_backward": "#98a2ae",
    "clip": "#cbd1d8",
    "noise": "#59626d",
    "optimizer_step": "#404852",
    "zero_grad": "#868f9a",
    "proof": "#ccd4cc",
}
PHASE_LETTERS = {
    "setup": "S",
    "forward": "F",
    "backward": "B",
    "second_backward": "B2",
    "clip": "C",
    "noise": "N",
    "optimizer_step": "O",
    "zero_grad": "Z",
    "proof": "P",
}

# The program's own categories get browns and olives, which no built-in category has.
_OWN_COLORS = ("#7a5c2e", "#b39b6d", "#5d6327", "#a3a55b", "#8a6f63", "#c9b1a2", "#6b4a3a", "#8f8f3a")
_DPI = 150
_LEGEND_ROWS = 24
_LETTER = 0.13  # inches of a phase's letter
_LABEL_LENGTH = 28  # characters of a name
NAME = "name"  # the group of texts that stay as they are
# matplotlib knows the file of Noto Sans CJK by its first font, which has Chinese characters as well.
_CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Droid Sans Fallback",
)
_TIMES = {"s": 1.0, "ms": 1e-3}
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, except those of categories and phases."""

    background: str
    text: str
    muted: str  # axes, labels, marks of phases and steps
    grid: str
    accent: str  # the peak, a limit, an allocation that failed


THEMES = {
    "light": Theme(background="#ffffff", text="#1b1f24", muted="#57606a", grid="#e3e6ea", accent="#c1121f"),
    "dark": Theme(background="#14171c", text="#e8eaed", muted="#9aa3ad", grid="#2c3138", accent="#ff6b6b"),
}


def category_color(category: str) -> str:
    """Returns the colour of a category, `#rrggbb`.

    A category of the program's own has the same colour in every report; two of them may share one.
    """
    return CATEGORY_COLORS.get(category) or _OWN_COLORS[zlib.crc32(category.encode()) % len(_OWN_COLORS)]


def mixed(one: str, other: str, share: float) -> str:
    """Returns the colour that is `share` of the way from one `#rrggbb` to the other."""
    parts = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + share * (high - low)):02x}" for low, high in parts)


@contextlib.contextmanager
def saved_figure(
    path: str | os.PathLike[str], theme: str = "light", size: tuple[float, float] = (11, 6)
) -> Iterator["Figure"]:
    """Yields a new figure, and saves it to `path` as a PNG at the end of the block.

    Args:
        path: the file, replaced atomically; its directory is made.
        theme: "light" or "dark".
        size: width and height in inches, at 150 dots per inch.

    Raises:
        MemprofError: matplotlib is not installed, or `path` cannot be written.
    """
    matplotlib = require("matplotlib", "pictures")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the figure's colours do not suit the user's own style
        matplotlib.rcParams.update(_style(THEMES[theme]))
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        with _missing_glyphs_named():
            yield figure
            _translate(figure)
            if in_megabytes.get():
                _name_megabytes(figure)
            with replacing(path) as temporary:
                figure.savefig(temporary, format="png", metadata={"Software": "opacus-memprof"})


def _name_megabytes(figure: "Figure") -> None:
    """Says in the lower right corner how much a MB is, or after the words that are below the axes."""
    note = translated(MEGABYTE_NOTE)
    if below := figure.get_supxlabel():
        figure.supxlabel(f"{below} ({note})", fontsize=9)
    else:
        figure.supxlabel(note, x=0.995, ha="right", fontsize=7)


def _translate(figure: "Figure") -> None:
    """Puts titles, legends and marks into the current language, except names, and whatever stands at ticks."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_gid() != NAME:
            text.set_text("\n".join(map(translated, text.get_text().split("\n"))))


def translated(text: str) -> str:
    """Returns the text in the current language, if a font has its characters; otherwise says once that none has."""
    if current_language() == "en":
        return text
    if len(_font_families()) == 1:
        _say_glyphs_are_missing()
        return text
    return tr_sentence(tr(text), least_words=1)


@contextlib.contextmanager
def _missing_glyphs_named() -> Iterator[None]:
    """Turns matplotlib's warnings about glyphs, one for each character, into one sentence for the process."""
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)  # it would log that such a font has no bold
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        log.setLevel(level)
    for each in caught:
        if re.search("missing from (current )?font", str(each.message)):  # matplotlib 3.8 says "current font"
            _say_glyphs_are_missing()
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@functools.cache
def _say_glyphs_are_missing() -> None:
    said = tr(
        "no font here has some characters of the words in a picture: install a font that has them, such as Debian's "
        "package fonts-noto-cjk, and draw it again"
    )
    print(f"opacus-memprof: {said}", file=sys.stderr)


@functools.cache
def _font_families() -> list[str]:
    """Returns matplotlib's own font, and the installed fonts for the characters that it does not have."""
    from matplotlib import font_manager

    if set(font_manager.get_font_names()).isdisjoint(_CJK_FONTS):  # matplotlib's list is older than some fonts
        known = {font.fname for font in font_manager.fontManager.ttflist}
        for path in sorted(set(font_manager.findSystemFonts()) - known):
            with contextlib.suppress(OSError, RuntimeError):  # of files that it cannot read
                font_manager.fontManager.addfont(path)
    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in _CJK_FONTS if name in installed)]


def _style(theme: Theme) -> dict[Any, Any]:
    return {
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.text,
        "axes.titlecolor": theme.text,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "text.color": theme.text,
        "text.parse_math": False,  # module names are not formulas
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.text,
        "ytick.labelcolor": theme.text,
        "font.family": _font_families(),
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "patch.linewidth": 0,
    }


def byte_axis(axis: "Axis", largest: float, ticks: int = 6) -> None:
    """Gives an axis at most `ticks` ticks, at round numbers of the unit that fits `largest` bytes, like `1.5 GiB`."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    unit, scale = next((item for item in reversed(_UNITS.items()) if largest >= item[1]), ("B", 1))
    if in_megabytes.get():
        unit, scale = "MB", 2**20
    locator = MaxNLocator(nbins=ticks, steps=[1, 2, 2.5, 5, 10], integer=unit == "B")
    steps = locator.tick_values(0, max(largest, 1) / scale)
    axis.set_major_locator(MultipleLocator(float(steps[1] - steps[0]) * scale))
    axis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / scale:g} {unit}" if size else "0"))


def second_axis(axis: "Axis") -> None:
    """Labels an axis of seconds in the unit that fits its end: `0 ms` to `250 ms`, or `0.5 s` to `1.5 s`."""
    from matplotlib.ticker import FuncFormatter

    def label(seconds: float, _: int | None) -> str:
        end = max(axis.get_view_interval())
        unit, scale = next((each for each in _TIMES.items() if end >= each[1]), ("µs", 1e-6))
        return f"{seconds / scale:g} {unit}"

    axis.set_major_formatter(FuncFormatter(label))


def event_axis(axis: "Axis") -> None:
    """Labels an axis of event numbers like `250k` and `1.6M`."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(EngFormatter(sep=""))


def stacked_areas(axes: "Axes", x: Sequence[float], columns: Mapping[str, Sequence[int]]) -> None:
    """Draws bytes by category over x, as steps: row i lasts from x[i] until x[i + 1].

    Args:
        axes: the axes.
        x: the positions of rows.
        columns: bytes by category, each of x's length.
    """
    present = stack_order(category for category, column in columns.items() if any(column))
    if present:
        axes.stackplot(
            x,
            [columns[category] for category in present],
            labels=[category_label(category) for category in present],
            colors=[category_color(category) for category in present],
            step="post",
            linewidth=0,
        )
    byte_axis(axes.yaxis, max((sum(row) for row in zip(*columns.values(), strict=True)), default=0))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)


def stacked_bars(
    axes: "Axes",
    names: Sequence[str],
    rows: Sequence[Mapping[str, int]],
    *,
    colors: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> None:
    """Draws a horizontal bar of bytes by category for each name, from top to bottom.

    Args:
        axes: the axes.
        names: the labels of bars.
        rows: bytes by category of each bar.
        colors: colours by part, in the order of the stack, if the parts of bars are not categories.
        texts: texts at the ends of the bars, instead of their sums.
    """
    ends = [0] * len(rows)
    parts = stack_order(part for row in rows for part in row) if colors is None else colors
    for part in parts:
        sizes = [row.get(part, 0) for row in rows]
        if any(sizes):
            color = category_color(part) if colors is None else colors[part]
            axes.barh(range(len(rows)), sizes, left=ends, label=category_label(part), color=color)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, end in enumerate(ends):
        axes.annotate(
            format_bytes(end) if texts is None else texts[place],
            (end, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    label_bars(axes, names)
    width = max(max(ends, default=0), 1) * (1.2 if texts is None else 1.6)  # space for the texts
    axes.set_xlim(0, width)
    byte_axis(axes.xaxis, width)


def label_bars(axes: "Axes", names: Sequence[str]) -> None:
    """Labels horizontal bars at 0, 1 …, from top to bottom. Up to three bars are equally thick, in the middle."""
    axes.set_yticks(range(len(names)), names)
    beside = max(3 - len(names), 0) / 2 + 0.5
    axes.set_ylim(len(names) - 1 + beside, -beside)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def phase_strip(
    axes: "Axes", events: Sequence[float], phases: Sequence[str], steps: Sequence[int], height: tuple[float, float]
) -> None:
    """Draws the program's phase from each event until the next, with its letter where there is room.

    Idle time between two parts of one phase in one step counts as that phase, because worker threads that allocate for
    a backward are in no phase.

    Args:
        axes: the axes.
        events: numbers of events, or their times.
        phases: the phase after each event.
        steps: the step after each event.
        height: lower and upper edge, as fractions of the axes' height.
    """
    phases, last = list(phases), 0  # the last row that was not idle
    for row, phase in enumerate(phases):
        if phase != "idle":
            if phases[last] == phase and steps[last] == steps[row]:
                phases[last:row] = [phase] * (row - last)
            last = row
    spans: dict[str, list[tuple[float, float]]] = {}
    for phase, group in groupby(zip(pairwise(events), phases, strict=False), lambda row: row[1]):
        intervals = [interval for interval, _ in group]
        spans.setdefault(phase, []).append((intervals[0][0], intervals[-1][1] - intervals[0][0]))
    for phase in (phase for phase in PHASE_COLORS if phase in spans):
        low, high = height
        style: dict[str, Any] = {"color": PHASE_COLORS[phase], "linewidth": 0}
        axes.broken_barh(spans[phase], (low, high - low), transform=axes.get_xaxis_transform(), **style)
        for start, length in spans[phase]:
            if length >= _letter_width(axes):
                _letter(axes, phase, start + length / 2, (low + high) / 2)


def _letter_width(axes: "Axes") -> float:
    """Returns the room that a letter needs, in units of the x axis."""
    inches = 0.75 * axes.get_window_extent().width / _DPI  # the legend takes the rest
    low, high = axes.get_xlim()
    return _LETTER * (high - low) / inches


def _letter(axes: "Axes", phase: str, x: float, y: float) -> None:
    dark = int(PHASE_COLORS[phase][1:3], 16) < 0x80
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": "#ffffff" if dark else "#000000"}
    axes.text(x, y, PHASE_LETTERS[phase], transform=axes.get_xaxis_transform(), clip_on=True, **style)


def phase_legend(owner: "Figure | SubFigure | Axes", phases: Iterable[str], **place: Any) -> None:
    """Draws a legend of phases, in one line."""
    from matplotlib.patches import Patch

    shown = [phase for phase in PHASE_COLORS if phase in set(phases)]
    if shown:
        handles = [
            Patch(color=PHASE_COLORS[phase], label=f"{PHASE_LETTERS[phase]}  {translated(phase.replace('_', ' '))}")
            for phase in shown
        ]
        owner.legend(handles=handles, ncols=len(PHASE_COLORS), handlelength=1, **place)


def legend(figure: "Figure | SubFigure", *axes: "Axes") -> None:
    """Draws one legend of these axes on the right, with each label once, in the order of the stack from its top."""
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    place = {category_label(category): index for index, category in enumerate(CATEGORY_COLORS)}
    labels = sorted(entries, key=lambda label: place.get(label, len(place)), reverse=True)
    drawn = figure.legend(
        [entries[label] for label in labels],
        labels,
        loc="outside right upper",
        ncols=math.ceil(len(labels) / _LEGEND_ROWS),
    )
    name_parts(text for text in drawn.get_texts() if not isinstance(entries[text.get_text()], Line2D))


def name_parts(texts: "Iterable[Text]") -> None:
    """Marks texts as names, such as categories, which are the same in every language. Marks and lines have words."""
    for text in texts:
        text.set_gid(NAME)


def category_label(category: str) -> str:
    """Formats a category's name for a picture: `per sample gradients`."""
    return shorten_name(category.replace("_", " "), _LABEL_LENGTH)
