# SPDX-License-Identifier: Apache-2.0
"""What all pictures share."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.language import in_language
from opacus_memprof.reports import figures
from opacus_memprof.reports.figures import THEMES, category_color

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("theme", THEMES)
def test_a_picture_has_its_theme_s_background(tmp_path: Path, theme: str) -> None:
    from matplotlib.colors import to_hex
    from matplotlib.image import imread

    with figures.saved_figure(tmp_path / "new" / "a.png", theme, (2, 1)) as figure:
        figure.subplots()
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(PNG)
    assert to_hex(imread(tmp_path / "new" / "a.png")[0, 0]) == THEMES[theme].background
    assert [file.name for file in tmp_path.rglob("*.*")] == ["a.png"]


def test_stacks_end_at_their_sum_and_legends_have_their_categories(tmp_path: Path) -> None:
    with figures.saved_figure(tmp_path / "a.png") as figure:
        areas, bars = figure.subplots(2)
        figures.stacked_areas(areas, [0, 1], {"noise": [1, 2], "gradients": [4, 8], "inputs": [0, 0]})
        figures.stacked_bars(bars, ["one", "two"], [{"noise": 3}, {"teacher": 4, "gradients": 2, "inputs": 0}])
        figures.legend(figure, areas, bars)
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["teacher", "noise", "gradients"]
        assert max(area.get_datalim(areas.transData).y1 for area in areas.collections) == 10
        assert [text.get_text() for text in bars.texts] == ["3 B", "6 B"]
        assert max(bar.get_x() + bar.get_width() for bar in bars.patches) == 6
        assert {bar.get_facecolor() for bar in bars.patches} == {
            (*(int(category_color(name)[at : at + 2], 16) / 255 for at in (1, 3, 5)), 1.0)
            for name in ("noise", "gradients", "teacher")
        }


@pytest.mark.parametrize(
    ("largest", "labels"),
    [
        (0, ["0", "1 B"]),
        (5, ["0", "1 B", "2 B", "3 B", "4 B", "5 B"]),
        (3 * 2**30, ["0", "0.5 GiB", "1 GiB", "1.5 GiB", "2 GiB", "2.5 GiB", "3 GiB"]),
        (900 * 2**20, ["0", "200 MiB", "400 MiB", "600 MiB", "800 MiB"]),
    ],
)
def test_an_axis_counts_in_round_binary_units(tmp_path: Path, largest: int, labels: list[str]) -> None:
    with figures.saved_figure(tmp_path / "a.png") as figure:
        axes = figure.subplots()
        axes.set_ylim(0, max(largest, 1))
        figures.byte_axis(axes.yaxis, largest)
        figure.canvas.draw()
        assert [
            tick.get_text() for tick in axes.get_yticklabels() if 0 <= tick.get_position()[1] <= max(largest, 1)
        ] == labels


@pytest.mark.parametrize(
    ("last", "labels"),
    [
        (2, ["0", "1", "2"]),
        (16_000, ["0", "2k", "4k", "6k", "8k", "10k", "12k", "14k", "16k"]),
        (1_600_000, ["0", "200k", "400k", "600k", "800k", "1M", "1.2M", "1.4M", "1.6M"]),
    ],
)
def test_an_axis_of_events_has_no_exponent(tmp_path: Path, last: int, labels: list[str]) -> None:
    with figures.saved_figure(tmp_path / "a.png") as figure:
        axes = figure.subplots()
        axes.set_xlim(0, last)
        figures.event_axis(axes.xaxis)
        figure.canvas.draw()
        assert [tick.get_text() for tick in axes.get_xticklabels() if 0 <= tick.get_position()[0] <= last] == labels
        assert axes.xaxis.get_offset_text().get_text() == ""


def test_a_user_s_style_is_kept_and_not_used(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "red"}):
        with figures.saved_figure(tmp_path / "a.png") as figure:
            assert figure.subplots().get_facecolor() == (1, 1, 1, 1)
        assert matplotlib.rcParams["axes.facecolor"] == "red"


def test_an_unwritable_path_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(MemprofError, match=r"cannot write .*file/a.png"),
        figures.saved_figure(tmp_path / "file" / "a.png"),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(ZeroDivisionError), figures.saved_figure(tmp_path / "a.png"):
        raise ZeroDivisionError
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.png", "old")]


def test_without_matplotlib_the_user_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MemprofError, match="pip install matplotlib"), figures.saved_figure(tmp_path / "a.png"):
        pass


def draw(path: Path, title: str) -> np.ndarray:
    from matplotlib.image import imread

    with figures.saved_figure(path, "light", (4, 1)) as figure:
        figure.suptitle(title)
    return imread(path)


@pytest.mark.parametrize(("end", "labels"), [(2.5, ["0 s", "0.5 s", "1 s"]), (0.25, ["0 ms", "500 ms", "1000 ms"])])
def test_an_axis_of_seconds_has_one_unit(end: float, labels: list[str], tmp_path: Path) -> None:
    with figures.saved_figure(tmp_path / "a.png") as figure:
        axes = figure.subplots()
        axes.set_xlim(0, end)
        figures.second_axis(axes.xaxis)
        assert [axes.xaxis.get_major_formatter()(x) for x in (0, 0.5, 1)] == labels


def test_chinese_names_have_glyphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if len(figures._font_families()) == 1:
        pytest.skip("no font here has Chinese characters")
    first, second = draw(tmp_path / "a.png", "模型"), draw(tmp_path / "b.png", "梯度")
    assert (first != second).any()  # without glyphs both are two empty boxes
    assert capsys.readouterr().err == ""


def test_a_font_that_matplotlib_s_list_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import font_manager

    manager = font_manager.fontManager
    path, other = "/fonts/NotoSansCJK-Regular.ttc", "/fonts/broken.ttf"

    def add(font: str) -> None:
        if font == other:
            raise RuntimeError("cannot open resource")
        manager.ttflist.append(font_manager.FontEntry(fname=font, name="Noto Sans CJK JP"))

    known = [entry for entry in manager.ttflist if entry.name not in figures._CJK_FONTS]
    count = len(known)
    monkeypatch.setattr(manager, "ttflist", known)
    monkeypatch.setattr(manager, "addfont", add)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [path, other, known[0].fname])
    assert figures._font_families.__wrapped__() == ["DejaVu Sans", "Noto Sans CJK JP"]
    assert len(known) == count + 1  # what is known is not added again


def test_characters_without_a_glyph_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "_font_families", lambda: ["DejaVu Sans"])
    figures._say_glyphs_are_missing.cache_clear()
    assert (draw(tmp_path / "a.png", "模型") == draw(tmp_path / "b.png", "梯度")).all()
    assert capsys.readouterr().err.count("fonts-noto-cjk") == 1


def test_titles_that_stay_english_for_want_of_a_font_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "_font_families", lambda: ["DejaVu Sans"])
    figures._say_glyphs_are_missing.cache_clear()
    with in_language("zh"):
        for name in ("a.png", "b.png"):
            draw(tmp_path / name, "More than vanilla")
    assert capsys.readouterr().err.count("fonts-noto-cjk") == 1


def test_warnings_that_are_not_about_glyphs_pass(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="mine"), figures.saved_figure(tmp_path / "a.png"):
        warnings.warn("mine", stacklevel=1)
