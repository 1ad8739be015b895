# SPDX-License-Identifier: Apache-2.0
"""The colours of pictures and pages: of categories, of phases, and of a light and a dark theme."""

import zlib
from dataclasses import dataclass

from opacus_memprof.profiles.categories import CATEGORIES

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
