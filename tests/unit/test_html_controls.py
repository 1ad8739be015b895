# SPDX-License-Identifier: Apache-2.0
"""The HTML report's controls in a real browser, by mouse and by keyboard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened
from event_files import EventFile
from html_pages import MODULES, failed_training
from large_event_files import one_step, write_repeated

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.html.report_page import write_html

Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of a run that ended out of memory, and its profile."""
    directory = tmp_path_factory.mktemp("trained")
    profile = failed_training(directory)
    write_html(view_profile(profile, directory), directory / "report.html")
    return directory / "report.html", profile


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], np.ndarray]:
    """A page of ten steps, its profile, and the live bytes after each event."""
    directory = tmp_path_factory.mktemp("steps")
    _, live = write_repeated(one_step(60, MODULES), 10, directory)
    profile = build_profile(directory, status="finished", exit_code=0)
    write_html(view_profile(profile, directory), directory / "report.html")
    return directory / "report.html", profile, live


def test_the_timeline_zooms_by_mouse(open_page: Open, steps: tuple[Path, dict[str, Any], np.ndarray]) -> None:
    path, _, live = steps
    report = open_page(path, viewport={"width": 1200, "height": 1400})  # with all of the card in view
    mouse, box = report.page.mouse, report.page.locator(".chart").bounding_box()
    first, last = report.view()
    assert (first, last) == (0, len(live))
    left, width = box["x"] + 72, box["width"] - 72 - 12  # within the chart's margins
    middle = box["y"] + 150

    mouse.move(left + width * 0.25, middle)
    mouse.down()
    mouse.move(left + width * 0.5, middle)
    mouse.up()
    assert report.view() == pytest.approx((len(live) * 0.25, len(live) * 0.5), abs=2)
    report.page.keyboard.down("Shift")
    mouse.down()
    mouse.move(left + width * 0.75, middle)
    mouse.up()
    report.page.keyboard.up("Shift")
    assert report.view() == pytest.approx((len(live) * 0.1875, len(live) * 0.4375), abs=2)
    mouse.dblclick(left + width * 0.5, middle)
    assert report.view() == (first, last)

    report.page.keyboard.down("Control")
    mouse.wheel(0, -200)
    report.page.keyboard.up("Control")
    report.page.wait_for_function("() => document.querySelector('.range').textContent !== 'whole run'")
    assert report.view() == pytest.approx((len(live) * 0.25, len(live) * 0.75), abs=2)
    overview = report.page.locator(".overview").bounding_box()
    mouse.move(left + width * 0.5, overview["y"] + 20)
    mouse.down()
    mouse.move(left + width * 0.6, overview["y"] + 20)
    mouse.up()
    assert report.view() == pytest.approx((len(live) * 0.35, len(live) * 0.85), abs=2)
    report.page.get_by_role("button", name="Show the whole run").click()
    assert report.view() == (first, last)
    report.page.get_by_role("button", name="Show step 3 in the timeline").click()
    assert report.view() == pytest.approx((len(live) * 0.3, len(live) * 0.4), abs=2)


def test_the_timeline_is_read_by_keyboard(open_page: Open, steps: tuple[Path, dict[str, Any], np.ndarray]) -> None:
    path, profile, live = steps
    report = open_page(path)
    report.page.locator(".chart").focus()
    keys = report.page.keyboard
    keys.press("p")
    assert report.bytes(".tooltip .total") == [live.max()]
    assert f"event {live.argmax():,}" in report.texts(".tooltip")[0]
    held = {name: size for name, size in profile["devices"]["cuda:0"]["peak"]["categories"].items() if size}
    shown = dict(zip(report.texts(".tooltip td:first-child"), report.bytes(".tooltip table"), strict=True))
    assert {name: shown[name] for name in held if name in shown} == {n: s for n, s in held.items() if n in shown}
    assert len(shown) == min(len(held), 13)
    assert format_bytes(int(live.max())) in report.texts("#timeline [aria-live]")[0]

    before = report.view()
    keys.press("+")
    assert report.view()[1] - report.view()[0] == pytest.approx((before[1] - before[0]) / 2)
    for _ in range(3):
        keys.press("+")
    keys.press("ArrowRight")
    assert report.bytes(".tooltip .total") == [live[live.argmax() + 1]]
    keys.press("ArrowLeft")
    keys.press("ArrowLeft")
    assert report.bytes(".tooltip .total") == [live[live.argmax() - 1]]
    before = report.view()
    keys.press("Shift+ArrowRight")
    assert report.view()[0] == pytest.approx(before[0] + (before[1] - before[0]) / 5)
    keys.press("Home")
    assert report.view()[0] == 0
    keys.press("0")
    assert report.view() == (0, len(live))
    keys.press("Escape")
    assert not report.page.locator(".tooltip").is_visible()


def test_the_timeline_by_time_and_without_a_category(
    open_page: Open, steps: tuple[Path, dict[str, Any], np.ndarray]
) -> None:
    path, profile, live = steps
    report = open_page(path)
    report.page.get_by_role("button", name="By time").click()
    assert report.view() == (profile["devices"]["cuda:0"]["timeline"]["time_ns"][0], 40 * (len(live) + 1))
    report.page.get_by_role("button", name="Show the peak").click()
    report.page.locator(".chart").focus()
    report.page.keyboard.press("p")
    assert report.bytes(".tooltip .total") == [live.max()]
    largest, size = max(profile["devices"]["cuda:0"]["peak"]["categories"].items(), key=lambda item: item[1])
    report.page.locator(".legend").get_by_role("button", name=largest, exact=True).click()
    report.page.locator(".chart").focus()
    report.page.keyboard.press("p")
    assert report.bytes(".tooltip .total") == [live.max() - size]


def test_the_chart_shows_each_category_as_high_as_its_bytes(open_page: Open, tmp_path: Path) -> None:
    file = EventFile().add("alloc", 0x1000, 300_000, "model_parameters")
    file.add("alloc", 0x2000, 100_000, "noise").add("alloc", 0x3000, 1, "buffers")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    write_html(view_profile(profile, tmp_path), tmp_path / "report.html")
    report = open_page(tmp_path / "report.html")
    colors = report.page.locator(".chart canvas").evaluate(
        """(canvas) => {
            const column = canvas.getContext("2d").getImageData(canvas.width - 40, 0, 1, canvas.height).data;
            return Array.from({length: canvas.height}, (_, y) => [...column.slice(4 * y, 4 * y + 3)].join());
        }"""
    )
    parameters, noise = (colors.count(color) for color in ("123,191,247", "172,92,162"))  # of figures.py
    assert noise > 50
    assert parameters == pytest.approx(3 * noise, abs=3)


def test_modules_open_by_mouse(open_page: Open, trained: tuple[Path, dict[str, Any]]) -> None:
    path, profile = trained
    report, tree = open_page(path), profile["devices"]["cuda:0"]["peak"]["module_tree"]
    cells = report.page.locator(".cell").evaluate_all(
        "all => all.map((one) => [one.dataset.module, Number(one.dataset.bytes)])"
    )
    shown = dict(reversed(cells))  # of a module and what it holds itself the module
    assert shown["encoder"] == tree["encoder"]
    assert shown["head"] == tree["head"]
    assert shown[""] == tree[""]
    report.page.locator('.cell[data-module="encoder"]').click()
    assert report.texts(".breadcrumb li") == ["all modules", f"encoder {format_bytes(tree['encoder'])}"]
    inside = {row[0]: int(row[1]) for row in report.rows("Modules inside encoder")}
    assert inside == {"layers": tree["encoder.layers"], "norm": tree["encoder.norm"]}
    assert report.page.locator('.cell[data-module="encoder"]').bounding_box()["width"] > 1000
    report.page.locator("#modules .table").get_by_role("button", name="layers").click()
    assert report.page.locator(".icicle").get_attribute("data-module") == "encoder.layers"
    report.page.locator(".breadcrumb").get_by_role("button", name="all modules").click()
    assert report.texts(".breadcrumb li") == [f"all modules {format_bytes(tree[''])}"]


def test_lines_open_below_their_callers(open_page: Open, tmp_path: Path) -> None:
    """What has no known line is beside them, so that the sum is the peak."""
    file = EventFile()
    file.add("alloc", 0x1000, 9000, "activations", module="a")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    (device,) = profile.devices.values()
    device.peak.lines = {
        "net.py:3 in forward < train.py:9": {"activations": 5000},
        "net.py:4 in forward < train.py:9": {"activations": 2000},
        "train.py:7": {"activations": 1500},
    }
    write_html(view_profile(profile, tmp_path), tmp_path / "report.html")
    report = open_page(tmp_path / "report.html")
    lines = report.page.locator("#lines")
    cells = lines.locator(".cell").evaluate_all("all => all.map((one) => [one.ariaLabel, Number(one.dataset.bytes)])")
    assert {label.split(",")[0]: size for label, size in cells} == {
        "all lines": 9000,
        "train.py:9": 7000,
        "train.py:9 → net.py:3 in forward": 5000,
        "train.py:9 → net.py:4 in forward": 2000,
        "train.py:7": 1500,
        "all lines (no known line)": 500,
    }
    lines.locator('.cell[data-module="train.py:9"]').click()
    assert {row[0]: int(row[1]) for row in report.rows("Lines inside train.py:9")} == {
        "net.py:3 in forward": 5000,
        "net.py:4 in forward": 2000,
    }
    assert "line=train.py" in report.page.url


def test_modules_open_by_keyboard(open_page: Open, trained: tuple[Path, dict[str, Any]]) -> None:
    report = open_page(trained[0])
    keys = report.page.keyboard
    focused = "() => [document.activeElement.dataset.module, document.querySelector('.icicle').dataset.module]"
    report.page.locator(".cell").first.focus()
    names = []
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Enter", "ArrowDown", "Escape"):
        keys.press(key)
        names.append(report.page.evaluate(focused))
    big, small = sorted(("encoder", "head"), key=lambda name: -_tree(trained)[name])
    assert (big, small) == ("encoder", "head")
    assert names[:5] == [[big, ""], [small, ""], [big, ""], ["", ""], [big, ""]]
    assert names[5] == ["encoder", "encoder"]
    assert names[6] == ["encoder.norm", "encoder"]
    assert names[7] == ["", ""]


def _tree(trained: tuple[Path, dict[str, Any]]) -> dict[str, int]:
    tree: dict[str, int] = trained[1]["devices"]["cuda:0"]["peak"]["module_tree"]
    return tree


def test_many_modules_are_as_wide_as_their_bytes(open_page: Open, tmp_path: Path) -> None:
    file = EventFile()
    sizes = [1000 + 10 * layer for layer in range(200)]
    for layer, size in enumerate(sizes):
        file.add("alloc", 0x1000 + layer, size, "noise", module=f"model.layers.{layer}")
    file.add("alloc", 0x9000, sum(sizes), "noise", module="head")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    write_html(view_profile(profile, tmp_path), tmp_path / "report.html")
    cells = (
        open_page(tmp_path / "report.html")
        .page.locator(".cell")
        .evaluate_all("all => all.map((one) => [one.dataset.module, one.offsetLeft, one.offsetWidth])")
    )
    place = {name: (left, width) for name, left, width in cells}
    whole = place[""][1]
    assert place["head"] == pytest.approx((0, whole / 2), abs=1)
    assert place["model.layers"][1] == pytest.approx(whole / 2, abs=1), "model holds nothing but layers"
    at = place["model.layers"][0]
    for layer, size in enumerate(sizes):
        width = whole / 2 * size / sum(sizes)
        if f"model.layers.{layer}" in place:
            assert place[f"model.layers.{layer}"] == pytest.approx((at, width), abs=1.5)
        at += width
    assert len(place) > 50, "those of 3 pixels and more"


def test_tables_sort(open_page: Open, trained: tuple[Path, dict[str, Any]]) -> None:
    report = open_page(trained[0])
    label = "Largest live blocks at the peak"
    heading = report.page.locator(f'table[aria-label="{label}"]').get_by_role("button", name="bytes")
    sizes = [block["bytes"] for block in trained[1]["devices"]["cuda:0"]["peak"]["largest_blocks"]]
    report.rows(label)  # all of them
    heading.focus()
    for expected in (sorted(sizes, reverse=True), sorted(sizes)):
        report.page.keyboard.press("Enter")
        assert [int(row[0]) for row in report.rows(label)] == expected
    assert report.page.locator(f'table[aria-label="{label}"] th').first.get_attribute("aria-sort") == "ascending"


def test_links_within_the_page(open_page: Open, trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Also in a frame, as notebooks show it."""
    notebook = tmp_path / "notebook.html"
    page = trained[0].read_text().replace("&", "&amp;").replace('"', "&quot;")
    notebook.write_text(
        f'<meta charset="utf-8"><iframe srcdoc="{page}" width="1100" height="800"></iframe><footer>a notebook'
    )
    report = open_page(notebook)
    frame = report.page.frame_locator("iframe")
    assert not _in_view(frame.locator("#blocks-title"))
    frame.locator(".contents").get_by_role("link", name="Largest blocks at the peak").click()
    assert _in_view(frame.locator("#blocks-title"))
    assert frame.locator("#blocks-title").evaluate("(title) => title === document.activeElement")


def _in_view(element: Any) -> bool:
    top: float = element.evaluate("(one) => one.getBoundingClientRect().top")
    return 0 <= top < 800


def test_the_address_says_what_is_shown(
    open_page: Open, steps: tuple[Path, dict[str, Any], np.ndarray], trained: tuple[Path, dict[str, Any]]
) -> None:
    """Whoever opens the address sees the same part of the timeline, module and table."""
    report = open_page(steps[0])
    assert report.page.evaluate("location.hash") == ""
    report.page.get_by_role("button", name="By time").click()
    report.page.get_by_role("button", name="Show step 3 in the timeline").click()
    other = _opened_anew(open_page, report)
    assert other.view() == pytest.approx(report.view(), abs=1)
    assert other.page.get_by_role("button", name="By time").get_attribute("aria-pressed") == "true"
    other.page.get_by_role("button", name="Show the whole run").click()
    assert "from=" not in other.page.evaluate("location.hash")

    report = open_page(trained[0])
    report.page.locator('.cell[data-module="encoder"]').click()
    report.page.get_by_role("button", name="Ops", exact=True).click()
    other = _opened_anew(open_page, report)
    assert other.page.locator(".icicle").get_attribute("data-module") == "encoder"
    assert other.page.get_by_role("button", name="Ops", exact=True).get_attribute("aria-pressed") == "true"
    other.page.locator(".breadcrumb").get_by_role("button", name="all modules").click()
    assert "module=" not in other.page.evaluate("location.hash")


def _opened_anew(open_page: Open, report: Opened) -> Opened:
    path, _, fragment = report.page.evaluate("location.href").partition("#")
    assert fragment
    other = open_page(Path(path.removeprefix("file://")))
    other.page.goto(f"{path}#{fragment}")
    other.page.reload()
    other.page.wait_for_selector("footer")
    return other


def test_an_address_of_another_page_shows_the_beginning(open_page: Open, trained: tuple[Path, dict[str, Any]]) -> None:
    report = open_page(trained[0])
    report.page.goto(
        f"{trained[0].as_uri()}#run=7&device=cuda:9&module=<b>&from=x&to=-1&part=none&card=nowhere&unit=day"
    )
    report.page.reload()
    report.page.wait_for_selector("footer")
    assert report.page.locator(".icicle").get_attribute("data-module") == ""
    assert report.view()[0] == 0


def test_modules_are_searched(open_page: Open, trained: tuple[Path, dict[str, Any]]) -> None:
    path, profile = trained
    report, tree = open_page(path), profile["devices"]["cuda:0"]["peak"]["module_tree"]
    report.page.get_by_role("searchbox", name="Search modules").fill("LAYERS")
    found = {row[0]: int(row[1]) for row in report.rows("Modules with layers")}
    expected = {name: size for name, size in tree.items() if "layers" in name and size}
    assert found.items() <= expected.items()
    assert set(found) >= {name for name in profile["devices"]["cuda:0"]["peak"]["modules"] if "layers" in name}
    report.page.get_by_role("searchbox", name="Search modules").fill("no such module")
    assert "No module has a name with this text." in report.texts("#modules")[0]
    report.page.get_by_role("searchbox", name="Search modules").fill("")
    assert report.rows("Modules inside all modules")


def test_repeated_modules_are_one_row(open_page: Open, tmp_path: Path) -> None:
    file = EventFile()
    for layer in range(12):
        file.add("alloc", 0x1000 + layer, 1000 + layer, "noise", module=f"layers.{layer}.mlp")
    file.add("alloc", 0x9000, 500, "noise", module="layers.norm")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    write_html(view_profile(profile, tmp_path), tmp_path / "report.html")
    report = open_page(tmp_path / "report.html")
    report.page.locator('.cell[data-module="layers"]').first.click()
    inside = "Modules inside layers"
    whole = sum(1000 + layer for layer in range(12))
    rows = {row[0][:10]: row[1:3] for row in report.rows(inside)}
    assert rows == {"[0-11].mlp": ["1011", str(whole)], "norm": ["500", "500"]}  # the largest, and all together
    report.page.get_by_role("button", name="[0-11].mlp").click()
    assert [row[:2] for row in report.rows(inside)] == [[f"{layer}.mlp", str(1000 + layer)] for layer in range(12)]


def test_code_is_copied(open_page: Open, trained: tuple[Path, dict[str, Any]]) -> None:
    report = open_page(trained[0])
    report.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert report.texts("#verdict .headline") == ["OUT OF MEMORY in noise of step 0, cuda:0"]
    report.page.locator("#verdict").get_by_role("button", name="Copy").first.click()
    report.page.wait_for_function("() => document.querySelector('#verdict .copy').textContent === 'Copied'")
    assert report.page.evaluate("navigator.clipboard.readText()") == "B = 1"
