# SPDX-License-Identifier: Apache-2.0
"""Every category has a colour of its own, which stays apart from the others' for eyes that see fewer colours."""

from itertools import combinations

import numpy as np
import pytest
from event_files import CATEGORIES

from opacus_memprof.profiles.categories import REPORTED, stack_order
from opacus_memprof.reports.figures import CATEGORY_COLORS, THEMES, Theme, category_color

# Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB.
SEEN_AS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
PARTS = {"activation_hooks_shared", "activation_hooks_opacus_only"}  # of activation_hooks, and meant to look like it
SUMS = {"rounding", "cached", "outside_pytorch"}  # no categories of requested bytes


def linear(color: str) -> np.ndarray:
    rgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def to_cielab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of linear sRGB: another space than the one in which the colours were searched."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast_ratio(color: str, other: str) -> float:
    """As WCAG 2 defines it."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    lights = sorted((float(weights @ linear(each)) for each in (color, other)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def test_every_builtin_category_has_a_colour() -> None:
    assert set(CATEGORY_COLORS) == {*CATEGORIES, *REPORTED} | SUMS
    assert len(set(CATEGORY_COLORS.values())) == len(CATEGORY_COLORS)


@pytest.mark.parametrize(("eyes", "apart"), [("normal", 8.0), ("protanopia", 4.5), ("deuteranopia", 4.5)])
def test_two_categories_look_different(eyes: str, apart: float) -> None:
    """2.3 is what is just noticeable (Mahy 1994)."""
    seen = {name: to_cielab(SEEN_AS[eyes] @ linear(category_color(name))) for name in {*CATEGORIES, *REPORTED} - PARTS}
    distances = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(sorted(seen), 2)}
    nearest = min(distances, key=lambda pair: distances[pair])
    assert distances[nearest] > apart, (nearest, distances[nearest])


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_can_be_read(theme: Theme) -> None:
    background = theme.background
    for name in ("text", "muted", "accent"):
        assert contrast_ratio(getattr(theme, name), background) >= 4.5, name


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_a_category_stands_out_from_the_background(theme: Theme) -> None:
    for category in CATEGORIES:
        assert contrast_ratio(category_color(category), theme.background) > 1.3, category


def test_a_programs_own_category_keeps_its_colour() -> None:
    own = {category_color(f"own {index}") for index in range(50)}
    assert len(own) > 4
    assert not own & set(CATEGORY_COLORS.values())
    assert category_color("teacher") == "#c9b1a2"  # whatever process, whatever hash seed


def test_a_stack_has_the_programs_own_categories_on_top() -> None:
    assert stack_order(["zebra", "noise", "ape", "gradients", "model_parameters"]) == [
        "model_parameters",
        "gradients",
        "noise",
        "ape",
        "zebra",
    ]
