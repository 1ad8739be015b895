# SPDX-License-Identifier: Apache-2.0
"""oom_report.html in a real browser: a report that is made by hand, and one in which nothing is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Opened
from made_profiles import an_oom_report

from opacus_memprof.reports.figures import category_color
from opacus_memprof.reports.oom import build_oom_page

Open = Callable[..., Opened]

LONG = "model[0].<b>x</b>." + "very_long_name." * 12
REQUEST = {"bytes": 1029, "category": "noise", "module": LONG, "op": "mm", "phase": "clip", "step": 7}
MODULES = {LONG: {"activations": 5000, "mine": 30}, "": {"activations": 1}} | {
    f"layers.{index}": {"gradients": 100 + index} for index in range(30)
}
_FIGURES = {"predicted_peak_bytes": 8001, "saved_bytes": 4002}
SUGGESTION: dict[str, Any] = {"actions": [], "code": "x = 1\n", "computed": "by hand", **_FIGURES}
REPORT: dict[str, Any] = {
    "request": REQUEST,
    "live_bytes": 8500,
    "needed": {"bytes": 12_003, "parts": {"temp_matrices": 10_000, "resident": 2003, "noise": 0}},
    "holders": {
        "categories": {"activations": 5001, "gradients": 3435, "mine": 30},
        "modules": MODULES,
        "steps": [{"step": 7, "age": 0, "bytes": 400}, {"step": 5, "age": 2, "bytes": 8066}],
    },
    "room": {"reserved_bytes": 9000, "limit_bytes": None, "rounding": 1.5, "capacity_bytes": 7777},
    "batch": {"samples": 64, "bytes_per_sample": 17, "largest_that_fits": None},
    "layers": [
        {
            "module": "",
            "kind": "Linear",
            "samples": 64,
            "tokens": 3,
            "activations_bytes": 11,
            "per_sample_gradients_bytes": 12,
            "ghost_bytes": 13,
            "flash_clip_bytes": 14,
        }
    ],
    "suggestions": [{"title": f"{fits}", "fits": fits, **SUGGESTION} for fits in (True, False, None)],
}
EMPTY: dict[str, Any] = {"request": REQUEST, "needed": {"bytes": 1029}}


@pytest.fixture
def opened(open_page: Open, tmp_path: Path) -> Callable[[dict[str, Any]], Opened]:
    def opening(report: dict[str, Any]) -> Opened:
        (tmp_path / "oom_report.html").write_text(build_oom_page(an_oom_report(**report)), encoding="utf-8")
        return open_page(tmp_path / "oom_report.html", viewport={"width": 500, "height": 900})

    return opening


def test_every_figure_is_the_reports(opened: Callable[[dict[str, Any]], Opened]) -> None:
    page = opened(REPORT)
    in_use = [(row[0], int(row[1])) for row in page.rows("Held by category")]
    assert in_use == [("activations", 5001), ("gradients", 3435), ("mine", 30)]
    modules = [(row[0], int(row[1])) for row in page.rows("Held by module")]
    assert modules[:2] == [(LONG, 5030), ("layers.29", 129)]
    assert dict(modules) == {name or "(no module)": sum(sizes.values()) for name, sizes in MODULES.items()}
    assert [row[:2] for row in page.rows("Held by age")] == [["step 5 (2 ago)", "8066"], ["step 7 (this one)", "400"]]
    assert [row[:2] for row in page.rows("Needed by category")] == [["temp_matrices", "10000"], ["resident", "2003"]]
    assert "11.72 KiB" in page.texts("#needed h2")[0]
    assert page.rows("What would have fitted") == [
        ["reserved", "9000"],
        ["requested bytes that fit, with a margin", "7777"],
        ["a sample, at the peak", "17"],
        ["samples that fit at a time", "0 of 64"],
    ]
    assert page.rows("Layers") == [["(the model) Linear, 64 samples of 3", "11", "12", "13", "14"]]
    assert page.bytes("#change") == [8001, 4002] * 3
    assert page.texts("#change h4") == ["True\nfits", "False\nnot enough alone", "None"]
    assert page.texts("header .error")[0].startswith(f"cuda:0: 1.00 KiB of noise of {LONG} (mm) in clip of step 7")


def test_colours_are_the_palettes(opened: Callable[[dict[str, Any]], Opened]) -> None:
    page = opened(REPORT)
    color = "(all) => all.map((one) => one.style.background)"
    shown = page.page.locator("#held .table:first-of-type .swatch").evaluate_all(color)
    hexadecimal = ["#{:02x}{:02x}{:02x}".format(*map(int, rgb[4:-1].split(","))) for rgb in shown]
    assert hexadecimal == [category_color(name) for name in REPORT["holders"]["categories"]]


def test_a_long_name_widens_nothing(opened: Callable[[dict[str, Any]], Opened]) -> None:
    page = opened(REPORT)
    assert page.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_nothing_is_known(opened: Callable[[dict[str, Any]], Opened]) -> None:
    page = opened(EMPTY)
    assert page.texts("#change p") == ["No known change would make it fit."]
    assert page.texts("#held p") == ["nothing"] * 3
    assert page.texts("#needed p") == ["nothing"]
    assert page.texts("#layers p") == ["not known"]
    assert page.rows("What would have fitted") == []


def test_without_scripts_it_says_where_to_look() -> None:
    page = build_oom_page(an_oom_report(**REPORT))
    assert "needs JavaScript. The same figures: oom_report.txt." in page
    assert "http" not in page.replace("http-equiv", "")
