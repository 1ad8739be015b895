# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of experiments, from results made by hand."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.experiments import comparison, pictures, summary

MIB = 2**20


def result(mode: str, mebibytes: dict[str, int], milliseconds: float | None = 10.0, **changes: Any) -> dict[str, Any]:
    """Trained from event 20 on: forward for ten events, backward for ten more."""
    sizes = {category: size * MIB for category, size in mebibytes.items()}
    total = sum(sizes.values())
    names = ["0_model_loaded", "1_data_prepared", "2_optimizer_set_up"]
    return {
        "format": 1,
        "experiment": mode,
        "status": "finished",
        "error": None,
        "config": {"model": "tiny", "seq_length": 8, "batch_size": 2, "dtype": "fp32"},
        "environment": {"device_name": "a GPU", "torch": "2", "opacus": "1"},
        "data": {"source": "synthetic", "reason": "random"},
        "avg_time_ms": milliseconds,
        "breakdown": {},
        "peak": {"categories": sizes, "rounding": 0, "requested_bytes": total},
        "out_of_memory": [],
        "snapshots": [{"name": name, "event": event} for name, event in zip(names, (10, 11, 20), strict=True)],
        "timeline": {
            "event": [0, 10, 20, 30, 40],
            "bytes": [0, total // 4, total // 2, total, total // 3],
            "phase": ["idle", "idle", "forward", "backward", "backward"],
            "categories": {"model_parameters": [0, total // 4, total // 2, total, total // 3]},
        },
        **changes,
    }


VANILLA = result("vanilla", {"model_parameters": 10, "activations": 30, "gradients": 2})
GHOST = result("ghost", {"model_parameters": 10, "activations": 20, "temp_matrices": 33}, 30.0)
RAN_OUT = result(
    "hooks",
    {"model_parameters": 10},
    None,
    status="out_of_memory",
    error="OutOfMemoryError while training: no more",
    out_of_memory=[{"requested_bytes": 50 * MIB, "categories": {"model_parameters": 10 * MIB, "activations": 7 * MIB}}],
)
NOTHING = result("flash_clip", {}, None, status="failed", error="no", peak=None, snapshots=[], timeline={})
FOUR = comparison.methods([("v", VANILLA), ("g", GHOST), ("h", RAN_OUT), ("f", NOTHING)])


def test_methods_come_in_the_modes_order_and_same_ones_by_their_names() -> None:
    assert [method.label for method in FOUR] == [
        "Vanilla (No DP-SGD)",
        "Hooks (DP-SGD)",
        "Ghost Clipping (DP-SGD)",
        "Flash Clipping (DP-SGD)",
    ]
    twice = comparison.methods([("fp32", GHOST), ("bf16", GHOST)])
    assert [method.label for method in twice] == ["Ghost Clipping (DP-SGD) bf16", "Ghost Clipping (DP-SGD) fp32"]
    assert comparison.vanilla_of(twice) is None


def test_what_a_method_takes_more_than_vanilla() -> None:
    vanilla, ran_out, ghost, _ = FOUR
    more = comparison.difference(ghost, vanilla)
    assert more == {"activations": -10 * MIB, "gradients": -2 * MIB, "temp_matrices": 33 * MIB}
    assert (ran_out.total, ran_out.refused_bytes) == (17 * MIB, 50 * MIB)


def test_the_summary() -> None:
    lines = summary.text(FOUR).splitlines()
    rows = [line.split() for line in lines[6:10]]
    assert rows[0] == ["Vanilla", "(No", "DP-SGD)", "42.00", "10.00", "4.20"]
    assert rows[1] == ["Hooks", "(DP-SGD)", "17.00", "out", "of", "memory", "-"]
    assert rows[2] == ["Ghost", "Clipping", "(DP-SGD)", "63.00", "30.00", "2.10"]
    assert rows[3] == ["Flash", "Clipping", "(DP-SGD)", "-", "failed", "-"]
    found = [" ".join(line.split()) for line in lines]
    ghost = found.index("Ghost Clipping (DP-SGD):")
    assert found[ghost + 2 : ghost + 6] == [
        "Temp Matrices 33.00 MB <- DP-SGD only",
        "Activations 20.00 MB <- -10.00 MB against vanilla",
        "Model Parameters 10.00 MB",
        "All, against vanilla +21.00 MB",
    ]
    assert "Wanted beyond that 50.00 MB" in found
    assert "Device: a GPU" in found


def test_a_change_that_rounds_to_nothing_is_not_told() -> None:
    slightly = result("ghost", {"model_parameters": 10, "activations": 20})
    slightly["peak"]["categories"]["model_parameters"] += 100
    text = summary.text(comparison.methods([("v", VANILLA), ("g", slightly)]))
    assert "+0.00 MB against vanilla" not in text


def test_captures_that_autograd_holds_as_well_are_told_from_those_of_opacus_alone() -> None:
    hooks = result("hooks", {"activation_hooks": 10, "model_parameters": 10})
    hooks["peak"]["activation_hooks"] = {"shared_with_autograd": 7 * MIB, "opacus_only": 3 * MIB}
    lines = summary.text(comparison.methods([("v", VANILLA), ("h", hooks)])).splitlines()
    (line,) = (" ".join(line.split()) for line in lines if "Activation Hooks" in line)
    assert line == "Activation Hooks 10.00 MB <- captured for DP-SGD; autograd holds 7.00 MB of it anyway"


def test_the_latex_table() -> None:
    assert summary.latex(FOUR).splitlines()[4:8] == [
        r"Vanilla (No DP-SGD) & 42.00 & +0.0 & 10.00 & 1.00 \\",
        r"Hooks (DP-SGD) & 17.00 & \multicolumn{3}{c}{out of memory} \\",
        r"Ghost Clipping (DP-SGD) & 63.00 & +50.0 & 30.00 & 3.00 \\",
        r"Flash Clipping (DP-SGD) & -- & \multicolumn{3}{c}{failed} \\",
    ]
    (named,) = comparison.methods([("x", {**GHOST, "experiment": "ghost"})])
    assert "50\\% \\& \\_" in summary.latex([comparison.Method("50% & _", named.result)])


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn, before it is saved."""
    kept: list[Any] = []
    drawn = pictures.drawn

    @contextlib.contextmanager
    def keeping(*arguments: Any) -> Iterator[Any]:
        with drawn(*arguments) as figure:
            yield figure
            kept.append(figure)

    monkeypatch.setattr(pictures, "drawn", keeping)
    return kept


def bars(axes: Any) -> dict[int, list[tuple[float, float]]]:
    """By place: from where to where, those without an area left out."""
    found: dict[int, list[tuple[float, float]]] = {}
    for bar in axes.patches:
        if bar.get_height():
            ends = sorted((bar.get_y() / MIB, (bar.get_y() + bar.get_height()) / MIB))
            found.setdefault(round(bar.get_x() + bar.get_width() / 2), []).append((ends[0], ends[1]))
    return found


def test_the_bars_are_the_bytes(figures: list[Any], tmp_path: Path) -> None:
    pictures.breakdown_comparison(FOUR, tmp_path / "a.png", "dark")
    left, right = figures[0].axes
    assert bars(left) == {
        0: [(0, 10), (10, 12), (12, 42)],  # parameters, gradients, activations
        1: [(0, 10), (10, 17), (17, 67)],  # and what was not to be had
        2: [(0, 10), (10, 30), (30, 63)],
    }
    assert bars(right) == {1: [(-2, 0), (-12, -2), (0, 33)]}
    words = [text.get_text() for text in (*left.texts, *right.texts)]
    assert words.count("failed") == 2
    assert {"out of memory\n+50.00 MiB", "out of memory", "+21.00 MiB"} <= set(words)


def test_the_timeline_starts_where_training_does(figures: list[Any], tmp_path: Path) -> None:
    pictures.timeline(FOUR, tmp_path / "a.png", "light")
    panels = figures[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "Vanilla",
        "Hooks: out of memory",
        "Ghost Clipping",
        "Flash Clipping: failed",
    ]
    assert panels[0].get_xlim() == (0, 20)
    assert len({panel.get_ylim() for panel in panels}) == 1
    (marker,) = (line for line in panels[0].lines if line.get_marker() == "v")
    assert (list(marker.get_xdata()), list(marker.get_ydata())) == ([10], [42 * MIB])
    assert [text.get_text() for text in panels[0].texts] == ["forward", "backward"]
    assert [text.get_text() for text in panels[3].texts] == ["nothing was recorded"]


def test_the_timeline_shows_set_up_where_the_peak_is_there(figures: list[Any], tmp_path: Path) -> None:
    early = result("hooks", {"model_parameters": 8})
    early["timeline"]["bytes"][1] = 9 * MIB
    pictures.timeline(comparison.methods([("h", early)]), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (-20, 20)
    assert {text.get_text().strip() for text in panel.texts} >= {"model loaded", "data prepared", "optimizer set up"}


def test_stages_of_set_up_have_names_where_there_is_room(figures: list[Any], tmp_path: Path) -> None:
    early = result("hooks", {"model_parameters": 8})
    early["timeline"]["bytes"][1] = 9 * MIB
    early["timeline"]["event"][-1] = 4000
    pictures.timeline(comparison.methods([("h", early)]), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (-20, 3980)
    assert {text.get_text().strip() for text in panel.texts} == {"backward"}


def test_the_timeline_hides_set_up_that_is_a_single_row(figures: list[Any], tmp_path: Path) -> None:
    """As of a long run, whose rows are far apart."""
    long = result("hooks", {"model_parameters": 8})
    for column in (*long["timeline"]["categories"].values(), *(long["timeline"][key] for key in ("event", "bytes"))):
        del column[1:3]
    del long["timeline"]["phase"][1:3]
    pictures.timeline(comparison.methods([("h", long)]), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (0, 20)
    assert [text.get_text() for text in panel.texts] == ["backward"]


def test_points_are_where_time_and_memory_are(figures: list[Any], tmp_path: Path) -> None:
    pictures.tradeoff(FOUR, tmp_path / "a.png", "light")
    (axes,) = figures[0].axes
    assert axes.collections[0].get_offsets().tolist() == [[10, 42 * MIB], [30, 63 * MIB]]
    assert {text.get_text() for text in axes.texts} == {
        "Vanilla",
        "Ghost Clipping\n1.50 x memory, 3.00 x time",
        "Hooks: out of memory\nFlash Clipping: failed",
    }


@pytest.mark.parametrize("count", [1, 20])
def test_one_result_and_twenty(count: int, figures: list[Any], tmp_path: Path) -> None:
    found: list[tuple[str, Any]] = [
        (f"a_configuration_with_a_long_name_{number}", {**GHOST, "avg_time_ms": 10.0 + number})
        for number in range(count)
    ]
    compared = comparison.methods(found)
    for draw in (pictures.breakdown_comparison, pictures.tradeoff):
        draw(compared, tmp_path / "a.png", "light")
    for figure in figures:  # all names within the picture, and no two points' labels on one another
        width, height = figure.bbox.size
        for axes in figure.axes:
            for text in axes.texts:
                box = text.get_window_extent()
                assert -1 <= box.x0 <= box.x1 <= width + 1
                assert -1 <= box.y0 <= box.y1 <= height + 1
    labels = [text.get_window_extent() for text in figures[-1].axes[0].texts]
    assert len(labels) == count
    assert not any(a.overlaps(b) for index, a in enumerate(labels) for b in labels[:index])
