# SPDX-License-Identifier: Apache-2.0
"""The page of a plan in a real browser, its table and its pictures."""

import csv
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Opened
from made_plans import MIB, ROOM, a_run, a_search, a_verdict

from opacus_memprof.profiles.plan import Plan
from opacus_memprof.reports.plan_exports import COLUMNS, write_plan_csv, write_plan_html, write_plan_pictures

Open = Callable[..., Opened]


def opened(open_page: Open, plan: Plan, directory: Path) -> Opened:
    write_plan_html(plan, directory / "plan.html")
    return open_page(directory / "plan.html")


def test_candidates_against_what_may_be_reserved(open_page: Open, tmp_path: Path) -> None:
    page = opened(open_page, a_search(), tmp_path)
    rows = page.rows("Candidates")
    expected = [("hooks on a100-40", 370, "a100-40"), ("hooks on h100", 740, "h100"), ("ghost on h100", 738, "h100")]
    assert [row[:6] for row in rows] == [
        [label, str(value), "fits", str((1024 + 100 * value) * MIB), str(ROOM[gpu]), str(ROOM[gpu])]
        for label, value, gpu in expected
    ]
    widths = page.page.locator("#candidates .candidate").evaluate_all(
        """bars => bars.map((bar) => {
          const [left, whole] = [bar.getBoundingClientRect().left, bar.getBoundingClientRect().width];
          const line = bar.querySelector(".capacity").getBoundingClientRect();
          const parts = [...bar.querySelectorAll(".bar span")].map((part) => part.getBoundingClientRect().width);
          return [line.left + line.width / 2 - left, ...parts].map((width) => width / whole);
        })"""
    )
    for (_, value, gpu), shares in zip(expected, widths, strict=True):
        sizes = [ROOM[gpu], 1024 * MIB, 60 * value * MIB, 40 * value * MIB]
        assert shares == pytest.approx([size / ROOM["h100"] for size in sizes], abs=0.004)
    assert page.texts("h1") == ["<u>train.py --lr 1"]
    assert page.texts(".virtual") == ["on virtual GPUs: memory is counted as on real ones"]
    assert page.texts("header .lead") == [
        "3 of 4 candidates fit. The smallest GPU that fits with hooks: a100-40 (38.57 GiB). "
        "The smallest GPU that fits with ghost: h100 (76.66 GiB)."
    ]


def test_the_largest_values_by_mode_and_gpu(open_page: Open, tmp_path: Path) -> None:
    page = opened(open_page, a_search(), tmp_path)
    assert page.rows("Largest batch-size") == [["hooks", "370", "740"], ["ghost", "none", "738"]]
    assert page.texts("#largest li") == ["ghost on a100-40: not even <i>batch-size=1</i> fits"]


def test_a_verdict_with_advice_and_drawn_batches(open_page: Open, tmp_path: Path) -> None:
    plan = a_verdict()
    page = opened(open_page, plan, tmp_path)
    assert [row[:2] for row in page.rows("Candidates")] == [
        ["as it is", "does not fit"],
        ["with more memory", "fits"],
        ["a smaller batch", "fits"],
        ["other settings", "does not fit"],
    ]
    assert page.texts("#advice .chip") == ["fits", "does not fit", "not tried"]
    assert page.texts("#advice pre")[2] == "<s>E"
    assert page.rows("Largest batches")[0][:2] == ["0.5", str(plan.draws["peaks"][0]["batch"])]
    assert page.texts("#draws .remedy") == ["max_physical_batch_size=480 was tried, and fits."]
    # The curve meets the line of what fits where P is the probability of running out of memory.
    path = page.page.locator(".curve .line").get_attribute("d").removeprefix("M").split("L")
    points = [tuple(map(float, point.split(","))) for point in path]
    line = page.page.locator(".curve line.capacity")
    at, top, bottom = (float(line.get_attribute(name)) for name in ("x1", "y1", "y2"))
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if pair[0][0] <= at <= pair[1][0])
    height = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    expected = math.log10(plan.draws["out_of_memory_probability"])
    assert -12 * (height - top) / (bottom - top) == pytest.approx(expected, abs=0.02)
    assert page.page.locator(".curve text").all_text_contents()[:5] == ["1", "1e-3", "1e-6", "1e-9", "1e-12"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_and_narrow_windows(open_page: Open, tmp_path: Path, scheme: str) -> None:
    page = opened(open_page, a_verdict(), tmp_path)
    page.page.emulate_media(color_scheme=scheme)
    page.page.set_viewport_size({"width": 480, "height": 800})
    background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) > 3 * 128
    assert light == (scheme == "light")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 480
    assert page.complaints == []


def test_the_table_has_every_run(tmp_path: Path) -> None:
    for plan, count in ((a_search(), 10), (a_verdict(), 5)):
        write_plan_csv(plan, tmp_path / "plan.csv")
        with open(tmp_path / "plan.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == count
        assert list(rows[0])[: len(COLUMNS)] == list(COLUMNS)
        for row in rows:
            parts = sum(int(row[f"{name}_bytes"]) for name in a_run(1).categories)
            assert parts == int(row["requested_bytes"])
    write_plan_csv(a_search(), tmp_path / "plan.csv")
    with open(tmp_path / "plan.csv", newline="") as file:
        memories = {(row["gpu"], int(row["gpu_memory_bytes"])) for row in csv.DictReader(file)}
    assert memories == {(gpu, room + 500 * MIB) for gpu, room in ROOM.items()}
    with open(tmp_path / "plan.csv", newline="") as file:
        assert [row["value"] for row in csv.DictReader(file) if row["fits"] == "True"] == list(
            map(str, [1, 370, 1, 740, 1, 738])
        )


def test_pictures_in_light_and_dark(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    for plan in (a_search(), a_verdict()):
        files = write_plan_pictures(plan, tmp_path / "plan.png")
        assert [file.name for file in files] == ["plan.png", "plan-dark.png"]
        corners = [image.imread(file)[0, 0, :3].mean() for file in files]
        assert corners[0] > 0.9
        assert corners[1] < 0.2
