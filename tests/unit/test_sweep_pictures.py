# SPDX-License-Identifier: Apache-2.0
"""What the pictures of several results show; that they look right is for the eye."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from opacus_memprof import reports
from opacus_memprof.experiments.configuration import grid
from opacus_memprof.experiments.directory import DETAILED_SWEEP, SINGLE_GPU
from opacus_memprof.experiments.figures import FIGURES, draw_figure, overview
from opacus_memprof.experiments.figures.overview import TYPE_COLORS, rows_by_sizes
from opacus_memprof.experiments.rows import MEMORY_TYPES, lines_over, varied_sizes
from opacus_memprof.language import in_language
from opacus_memprof.profiles.categories import REPORTED
from opacus_memprof.profiles.profile import PhasePeak
from opacus_memprof.reports.figures import CATEGORY_COLORS, THEMES, category_color, category_label
from tests.unit.sweep_results import BASE, GIB, a_row, failed, finished, out_of_memory, with_fields

CELLS, _ = grid(BASE, [16, 32], [8], [1, 2, 4], [0, 8])
MADE = [finished] * 10 + [failed, out_of_memory]
ROWS = [a_row(cell.name, cell.label, made(cell.configuration)) for cell, made in zip(CELLS, MADE, strict=True)]


def test_what_is_read_from_a_result() -> None:
    assert ROWS[0].short_label == "S 16 · B 8/1 · full"
    assert ROWS[0].total_bytes == GIB + 16 * 2**20 + 300
    assert ROWS[0].bytes == {"model_parameters": GIB, "activations": 16 * 2**20, "activation_hooks": 300}
    assert [ROWS[place].outcome for place in (0, -1, -2)] == ["finished", "out of memory", "failed"]
    assert [ROWS[place].refused_bytes for place in (0, -1, -2)] == [0, 3 * GIB, 0]
    assert (ROWS[-2].total_bytes, ROWS[-2].bytes) == (0, {})


def test_a_line_differs_in_one_size_only() -> None:
    assert varied_sizes(ROWS) == ["seq_length", "max_physical_batch_size", "lora_rank"]
    lines = lines_over("max_physical_batch_size", ROWS)
    assert sorted(len(line) for line in lines) == [2, 3, 3, 3]  # the one that failed has no peak
    for line in lines:
        sizes = [value for value, _ in line]
        assert sizes == sorted(sizes)
        tokens = line[0][1].result["config"]["seq_length"]
        assert [row.total_bytes for _, row in line] == [GIB + tokens * size * 2**20 + 300 for size in sizes]
    ranks = lines_over("lora_rank", ROWS)
    assert {tuple(value for value, _ in line) for line in ranks} == {(0, 8), (8,)}


def test_the_heat_map_finds_every_cell() -> None:
    cells = rows_by_sizes(ROWS)
    assert len(cells) == 12
    assert cells[8, 8, 32, 4].ran_out_of_memory
    assert cells[0, 8, 16, 2].result["config"]["max_physical_batch_size"] == 2
    whole = a_row("", "", finished(BASE))  # no physical batch size of its own: all of the batch at once
    assert list(rows_by_sizes([whole])) == [(0, 1, 128, 1)]


def test_components_kinds_and_operations() -> None:
    assert {name: sum(sizes.values()) for name, sizes in ROWS[0].components.items()} == {
        "mlp": GIB + 300,
        "other": 16 * 2**20,
    }
    assert ROWS[-2].components == {}
    assert ROWS[0].operation("backward") == ROWS[0].peak["categories"]
    assert ROWS[0].operation("noise") == {}
    assert TYPE_COLORS.keys() == MEMORY_TYPES.keys()


def test_a_colour_has_one_meaning_in_every_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars and areas have colours of categories, or of kinds of memory, each that of one of its categories."""
    drawn: list[tuple[str, str]] = []

    def keep_colours(figure: Any, path: Path, **options: Any) -> None:
        path.touch()
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                if not isinstance(handle, Line2D):
                    patch = handle.patches[0] if isinstance(handle, BarContainer) else handle
                    drawn.append((label, to_hex(np.atleast_2d(patch.get_facecolor())[0])))
            drawn.extend(("line", to_hex(line.get_color())) for line in axes.lines)

    monkeypatch.setattr(Figure, "savefig", keep_colours)
    meanings = {category_label(name): {color} for name, color in CATEGORY_COLORS.items()}
    for kind, color in TYPE_COLORS.items():
        own = MEMORY_TYPES[kind] or ("unattributed",)
        assert color in {category_color(category) for category in own}
        meanings.setdefault(kind, set()).add(color)
    for name in FIGURES:
        draw_figure(name, ROWS, tmp_path)
    assert {label for label, _ in drawn} >= {"model parameters", "parameters", "activation hooks", "line"}
    marks = {color for theme in THEMES.values() for color in (theme.accent,)}
    for label, color in set(drawn):
        if label == "line":
            red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
            assert color in marks or max(red, green, blue) - min(red, green, blue) < 24  # a grey
        else:
            assert color in meanings[label]


def test_all_pictures_are_there(tmp_path: Path) -> None:
    rows = [ROWS[0], ROWS[-1], ROWS[-2]]
    drawn = DETAILED_SWEEP.draw(rows, tmp_path)
    timelines = {f"memory_timeline_config_{row.name}" for row in rows}
    summaries = {"memory_analysis_overview", "memory_heatmap", "detailed_memory_analysis", "operation_level_breakdown"}
    expected = {f"{stem}{suffix}.png" for stem in timelines | summaries for suffix in ("", "_dark")}
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in drawn} == expected


def test_nothing_was_measured(tmp_path: Path) -> None:
    """Every run failed: there are pictures all the same, and they say so."""
    rows = [a_row(CELLS[0].name, CELLS[0].label, failed(CELLS[0].configuration))]
    DETAILED_SWEEP.draw(rows, tmp_path)
    SINGLE_GPU.draw(rows, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * 7


def test_every_picture_names_its_unit_and_the_virtual_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, list[str]]] = []

    def keep_texts(figure: Any, path: Path, **options: Any) -> None:
        figure.draw_without_rendering()  # which makes the ticks
        path.touch()
        drawn.append((figure.get_suptitle(), [text.get_text() for text in figure.findobj(Text)]))

    monkeypatch.setattr(Figure, "savefig", keep_texts)
    gpu = {"gpu": "t4", "name": "Tesla T4", "memory_bytes": 15 * 2**30, "devices": 1}
    for fields in ({}, {"virtual": gpu}):
        drawn.clear()
        rows = [replace(row, result=with_fields(row.result, **fields)) for row in (ROWS[0], ROWS[3], *ROWS[-2:])]
        for name in FIGURES:
            draw_figure(name, rows, tmp_path)  # light and dark
        assert len(drawn) >= 2 * len(FIGURES)
        assert {"virtual Tesla T4 (15360.00 MB)" in title for title, _ in drawn} == {bool(fields)}
        for _, texts in drawn:
            assert sum("1 MB is 2^20 bytes" in text for text in texts) == 1
            assert [text for text in texts if re.search(r"\d [KMGT]iB|\d B\b", text)] == []
            assert any(re.search(r"\d MB$", text) for text in texts)


def test_pictures_are_translated_if_a_font_has_the_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: set[str] = set()

    def keep_texts(figure: Any, path: Path, **options: Any) -> None:
        path.touch()
        said.update(line for text in figure.findobj(Text) for line in text.get_text().split("\n"))

    monkeypatch.setattr(Figure, "savefig", keep_texts)
    drawn = {}
    rows = [a_row("a", CELLS[0].label, finished(CELLS[0].configuration)), ROWS[-2], ROWS[-1]]
    rows[0].result.phases["noise"] = PhasePeak(2**20, 0, 0, 0, 0, {"noise": 2**20})
    for language, families in (("zh", ["DejaVu Sans", "Noto Sans CJK SC"]), ("zh", ["DejaVu Sans"]), ("en", [])):
        monkeypatch.setattr(reports.figures, "_font_families", lambda families=families: families)
        with in_language(language):
            for name in FIGURES:
                draw_figure(name, rows, tmp_path)
        drawn[language, len(families)] = set(said)
        said.clear()
    assert drawn["zh", 1] == drawn["en", 0]
    assert {"峰值时刻的内存，按类别", "每步时间", "序列长度", "F  前向传播"} <= drawn["zh", 2]
    assert {"parameters", "activations", "mlp"} <= drawn["zh", 2]  # names
    assert "加噪" in drawn["zh", 2]  # the title of a panel: a category has the same name
    assert sum(text.startswith("S：序列长度 · B：批次 / 物理批次 · r：LoRA 秩") for text in drawn["zh", 2]) == 2
    labels = {text.replace("_", " ") for text in REPORTED}
    english = {text for text in drawn["zh", 2] - labels if re.search("[a-z]+ [a-z]+ [a-z]+", text)}
    assert english == set()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn, before it is saved."""
    kept: list[Any] = []
    for module in (overview,):
        saved_figure = module.saved_figure

        @contextlib.contextmanager
        def keeping(*arguments: Any, saved_figure: Any = saved_figure) -> Iterator[Any]:
            with saved_figure(*arguments) as figure:
                yield figure
                kept.append(figure)

        monkeypatch.setattr(module, "saved_figure", keeping)
    return kept


def test_two_rows_of_operations_keep_legend_and_ticks(figures: list[Any], tmp_path: Path) -> None:
    from opacus_memprof.profiles.categories import REPORTED

    rows = [a_row(cell.name, cell.label, finished(cell.configuration)) for cell in CELLS[:2]]
    for place, phase in enumerate(("forward", "backward", "clip", "noise", "optimizer_step")):
        sizes = dict.fromkeys(REPORTED[4 * place : 4 * place + 4], 100 * 2**20)
        for row in rows:
            row.result.phases[phase] = PhasePeak(400 * 2**20, 0, 0, 0, 0, sizes)
    overview.operation_breakdown(rows, tmp_path / "a.png", "light")
    (figure,) = figures
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 20
    assert all(text.get_window_extent().y0 >= 0 for text in legend.get_texts())
    for axes in figure.axes:
        ticks = [tick.get_window_extent() for tick in axes.get_xticklabels() if tick.get_window_extent().width]
        low, high = axes.get_window_extent().x0 - 1, axes.get_window_extent().x1 + 1
        shown = [box for box in ticks if low <= (box.x0 + box.x1) / 2 <= high]
        assert shown
        assert not any(a.overlaps(b) for index, a in enumerate(shown) for b in shown[:index])


def test_the_lines_of_the_trends_are_explained(figures: list[Any], tmp_path: Path) -> None:
    overview.analysis_overview(ROWS, tmp_path / "a.png", "dark")
    panels = figures[0].get_children()[-1].axes
    assert [panel.get_title(loc="left") for panel in panels] == ["Sequence length", "Physical batch size", "LoRA rank"]
    labels = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert labels == ["Physical batch size", "1", "2", "4", "LoRA rank", "full", "8", "did not finish"]
    looks = {(line.get_color(), line.get_marker()) for line in panels[0].lines if line.get_linestyle() != "None"}
    assert len(looks) == 6  # one for each combination


def test_a_run_that_failed_before_anything_was_recorded_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no peak, which is another thing than a peak of 0 B."""
    shown: list[Any] = []

    @contextlib.contextmanager
    def kept(path: Path, *arguments: Any) -> Iterator[Any]:
        with original(path, *arguments) as figure:
            yield figure
            shown.extend(text.get_text() for axes in figure.axes for text in axes.texts)

    original = overview.saved_figure
    monkeypatch.setattr(overview, "saved_figure", kept)
    overview.detailed_analysis(ROWS, tmp_path / "a.png", "light")
    assert shown.count("nothing was recorded") == 1
    assert "0 B" not in shown
