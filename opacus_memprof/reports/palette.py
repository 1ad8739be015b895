# SPDX-License-Identifier: Apache-2.0
"""One colour for each category, the same in every picture and page.

Related categories have related hues: model state is blue, what autograd saves green, what only privacy needs red to
purple, temporaries yellow, communication and libraries turquoise, the rest grey. Hues, lightness and chroma were chosen
by a search in OKLab (Ottosson 2020) for the largest smallest distance between two categories, as people see them
with normal vision, protanopia and deuteranopia (Machado et al. 2009).
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

# In the order of a stack, from the bottom: what stays first, what comes and goes above it.
CATEGORY_COLORS = {
    # model state
    "model_parameters": "#7bbff7",
    "buffers": "#3b64b7",
    "optimizer_states": "#434e92",
    "gradients": "#5c8ce3",
    # forward's
    "inputs": "#b6dcac",
    "activations": "#92c27f",
    "forward_undecided": "#648b76",
    # privacy's
    "activation_hooks": "#f94b01",
    "activation_hooks_shared": "#f97a45",  # activation_hooks in two parts, as live counters have them
    "activation_hooks_opacus_only": "#e04300",
    "backprop_copies": "#fc8431",
    "per_sample_gradients": "#cb2a39",
    "temp_matrices": "#9d1910",
    "norm_samples": "#fc83c9",
    "clipping_temporaries": "#9347d7",
    "summed_gradients": "#823660",
    "noise": "#ac5ca2",
    # temporaries
    "forward_temporaries": "#e6be40",
    "backward_temporaries": "#fdde48",
    "optimizer_temporaries": "#edcf8d",
    # around it
    "communication": "#32b6a9",
    "library_workspace": "#86dbd3",
    "pending_free": "#8e8d96",
    "unattributed": "#686e70",
    # what is no category of requested bytes
    "rounding": "#a9adb3",
    "cached": "#c3c7cc",
    "outside_pytorch": "#d9dce0",
}

# Of phases: the hue of what each of them makes. Idle has none.
PHASE_COLORS = {
    "setup": "#7bbff7",
    "forward": "#92c27f",
    "backward": "#fdde48",
    "second_backward": "#e6be40",
    "clip": "#9347d7",
    "noise": "#ac5ca2",
    "optimizer_step": "#434e92",
    "zero_grad": "#8e8d96",
}

# The program's own categories get browns and olives, which no built-in category has.
_OWN_COLORS = ("#7a5c2e", "#b39b6d", "#5d6327", "#a3a55b", "#8a6f63", "#c9b1a2", "#6b4a3a", "#8f8f3a")


@dataclass(frozen=True)
class Theme:
    """What a picture is drawn with beside the categories' colours."""

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
    """`#rrggbb` of a category. One of the program's own gets the same colour wherever its name appears; two of them may
    share one."""
    return CATEGORY_COLORS.get(category) or _OWN_COLORS[zlib.crc32(category.encode()) % len(_OWN_COLORS)]


def stack_order(categories: Iterable[str]) -> list[str]:
    """The categories from the bottom of a stack to its top: built-in ones as listed above, then the program's own."""
    place = {category: index for index, category in enumerate(CATEGORY_COLORS)}
    return sorted(set(categories), key=lambda category: (place.get(category, len(place)), category))
