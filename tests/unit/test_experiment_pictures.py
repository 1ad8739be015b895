# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of experiments, from results made by hand."""

import colorsys
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.text import Text
from msgspec import to_builtins

from opacus_memprof.experiments import summary
from opacus_memprof.experiments.configuration import Cell, Configuration
from opacus_memprof.experiments.figures import bars, timeline
from opacus_memprof.experiments.rows import Row, find_vanilla, overhead
from opacus_memprof.experiments.rows import rows_by_mode as typed_rows_by_mode
from opacus_memprof.language import in_language
from opacus_memprof.reports.figures import PHASE_COLORS
from tests.unit.made_profiles import a_device, a_peak
from tests.unit.sweep_results import a_row, finished, typed

MIB = 2**20


def result(mode: str, mebibytes: dict[str, int], milliseconds: float | None = 10.0, **changes: Any) -> dict[str, Any]:
    """Trained from event 20 on: forward for ten events, backward for ten more."""
    sizes = {category: size * MIB for category, size in mebibytes.items()}
    total = sum(sizes.values())
    names = ["0_model_loaded", "1_data_prepared", "2_optimizer_set_up"]
    steps = {"step": 0, "logical_step": 0, "unix_ns": 0}
    snapshots = [
        {"index": index, "name": name, "event": event, "requested_bytes": event, "phase": "setup", "categories": {}}
        for index, (name, event) in enumerate(zip(names, (10, 11, 20), strict=True))
    ]
    return finished(Configuration(mode=mode, seq_length=8, batch_size=2)) | {  # type: ignore[arg-type]
        "environment": {"device_name": "a GPU", "torch": "2", "opacus": "1"},
        "avg_time_ms": milliseconds,
        "peak": to_builtins(a_peak(categories=sizes, rounding=0, requested_bytes=total, phase="backward")),
        "phases": {},
        "snapshots": [
            {**snapshot, **steps, "allocated_mb": None, "reserved_mb": None, "timestamp": 0.0} for snapshot in snapshots
        ],
        "timeline": {
            "event": [0, 10, 20, 30, 40],
            "bytes": [0, total // 4, total // 2, total, total // 3],
            "step": [0, 0, 0, 0, 0],
            "phase": ["idle", "idle", "forward", "backward", "backward"],
            "categories": {"model_parameters": [0, total // 4, total // 2, total, total // 3]},
        },
        "out_of_memory": [],
        **changes,
    }


def rows_by_mode(results: dict[str, dict[str, Any]]) -> list[Row]:
    return typed_rows_by_mode({name: typed(result) for name, result in results.items()})


VANILLA = result("vanilla", {"model_parameters": 10, "activations": 30, "gradients": 2})
GHOST = result("ghost", {"model_parameters": 10, "activations": 20, "temp_matrices": 33}, 30.0)
RAN_OUT = result(
    "hooks",
    {"model_parameters": 10, "activations": 9},
    None,
    status="out_of_memory",
    error="OutOfMemoryError while training: no more",
    out_of_memory=to_builtins(
        a_device(
            out_of_memory=[{"requested_bytes": 50 * MIB, "live_bytes": 17 * MIB, "category": "noise", "event": 40}]
        )
    )["out_of_memory"],
)
NOTHING = result("flash_clip", {}, None, status="failed", error="no", peak=None, snapshots=[], timeline={})
FOUR = rows_by_mode({"v": VANILLA, "g": GHOST, "h": RAN_OUT, "f": NOTHING})


def test_methods_are_ordered_by_mode_then_by_name() -> None:
    assert [method.label for method in FOUR] == [
        "Vanilla (No DP-SGD)",
        "Hooks (DP-SGD)",
        "Ghost Clipping (DP-SGD)",
        "Flash Clipping (DP-SGD)",
    ]
    twice = rows_by_mode({"fp32": GHOST, "bf16": GHOST})
    assert [method.label for method in twice] == ["Ghost Clipping (DP-SGD) bf16", "Ghost Clipping (DP-SGD) fp32"]
    assert find_vanilla(twice) is None


def test_what_a_method_takes_more_than_vanilla() -> None:
    vanilla, ran_out, ghost, _ = FOUR
    more = overhead(ghost, vanilla)
    assert more == {"activations": -10 * MIB, "gradients": -2 * MIB, "temp_matrices": 33 * MIB}
    assert (ran_out.total_bytes, ran_out.refused_bytes) == (19 * MIB, 50 * MIB)


def test_the_summary() -> None:
    lines = summary.summary_text(FOUR).splitlines()
    rows = [line.split() for line in lines[6:10]]
    assert rows[0] == ["Vanilla", "(No", "DP-SGD)", "42.00", "10.00", "4.20"]
    assert rows[1] == ["Hooks", "(DP-SGD)", "19.00", "out", "of", "memory", "-"]
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
    assert "In use when memory ran out 17.00 MB" in found
    assert "Wanted beyond that 50.00 MB" in found
    assert "Device: a GPU" in found
    assert found[-1].startswith("Components and stages leave out rounding")  # so they are less than the peak


def test_what_abbreviated_labels_mean_is_said_below_the_table() -> None:
    sizes = [Cell(Configuration(seq_length=length, batch_size=8, lora_rank=4)) for length in (16, 32)]
    rows = [a_row(cell.name, cell.label, finished(cell.configuration)) for cell in sizes]
    lines = summary.summary_text(rows).splitlines()
    assert lines[6].startswith("S 16 · B 8/8 · r 4 ")
    assert lines[9] == "S: sequence length · B: batch / physical batch · r: LoRA rank"
    assert not any(line.startswith("S: ") for line in summary.summary_text(FOUR).splitlines())


def test_a_phase_is_named_in_the_reader_s_language() -> None:
    assert summary.describe_outcome(FOUR[0]) == "finished, peak 42.00 MB in backward, 10 ms a step"
    with in_language("zh"):
        assert "峰值 42.00 MB（反向传播）" in summary.describe_outcome(FOUR[0])


def test_a_change_that_rounds_to_nothing_is_not_told() -> None:
    slightly = result("ghost", {"model_parameters": 10, "activations": 20})
    slightly["peak"]["categories"]["model_parameters"] += 100
    text = summary.summary_text(rows_by_mode({"v": VANILLA, "g": slightly}))
    assert "+0.00 MB against vanilla" not in text


def test_captures_of_opacus_alone_are_told_apart() -> None:
    hooks = result("hooks", {"activation_hooks": 10, "model_parameters": 10})
    hooks["peak"]["activation_hooks"] = {"shared_with_autograd": 7 * MIB, "opacus_only": 3 * MIB}
    lines = summary.summary_text(rows_by_mode({"v": VANILLA, "h": hooks})).splitlines()
    (line,) = (" ".join(line.split()) for line in lines if "Activation Hooks" in line)
    assert line == "Activation Hooks 10.00 MB <- captured for DP-SGD; autograd holds 7.00 MB of it anyway"


def test_the_latex_table() -> None:
    assert "Peak (MB)" in summary.latex_table(FOUR)
    assert summary.latex_table(FOUR).splitlines()[4:8] == [
        r"Vanilla (No DP-SGD) & 42.00 & +0.0 & 10.00 & 1.00 \\",
        r"Hooks (DP-SGD) & 19.00 & \multicolumn{3}{c}{out of memory} \\",
        r"Ghost Clipping (DP-SGD) & 63.00 & +50.0 & 30.00 & 3.00 \\",
        r"Flash Clipping (DP-SGD) & -- & \multicolumn{3}{c}{failed} \\",
    ]
    gpu = {"gpu": "t4", "name": "Tesla_T4", "memory_bytes": 2**30, "devices": 1}
    virtual = summary.latex_table(rows_by_mode({"v": VANILLA | {"virtual": gpu}})).splitlines()
    assert virtual[5:7] == [r"\midrule", r"\multicolumn{5}{l}{On a virtual Tesla\_T4 (1024.00 MB)} \\"]
    assert "50\\% \\& \\_" in summary.latex_table([a_row("x", "50% & _", GHOST)])


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn, before it is saved."""
    kept: list[Any] = []
    saved_figure = bars.saved_figure

    @contextlib.contextmanager
    def keeping(*arguments: Any) -> Iterator[Any]:
        with saved_figure(*arguments) as figure:
            yield figure
            kept.append(figure)

    for module in (bars, timeline):
        monkeypatch.setattr(module, "saved_figure", keeping)
    return kept


def spans(axes: Any) -> dict[int, list[tuple[float, float]]]:
    """Returns the spans of the bars at each place, except bars without an area and frames of others."""
    found: dict[int, list[tuple[float, float]]] = {}
    for bar in axes.patches:
        if bar.get_width() and not bar.get_hatch():
            ends = sorted((bar.get_x() / MIB, (bar.get_x() + bar.get_width()) / MIB))
            found.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append((ends[0], ends[1]))
    return found


def test_the_bars_are_the_bytes(figures: list[Any], tmp_path: Path) -> None:
    bars.breakdown_comparison(FOUR, tmp_path / "a.png", "dark")
    left, right = figures[0].axes
    assert spans(left) == {
        0: [(0, 10), (10, 12), (12, 42)],  # parameters, gradients, activations
        1: [(0, 10), (10, 19), (17, 67)],  # the peak; what was in use when memory ran out, and what was asked for
        2: [(0, 10), (10, 30), (30, 63)],
    }
    assert spans(right) == {2: [(-2, 0), (-12, -2), (0, 33)]}
    words = [text.get_text() for text in (*left.texts, *right.texts)]
    assert words.count("failed") == 2
    assert {"19.00 MiB, out of memory,\nasked 50.00 MiB more", "out of memory", "+21.00 MiB"} <= set(words)


def test_no_tick_s_label_is_on_another(figures: list[Any], tmp_path: Path) -> None:
    """Of axes whose room for words is as wide as their bars, and of those with bars on both sides."""
    for factor in (1, 23, 300):
        rows = [
            a_row(row.name, "a configuration whose name is long", scaled(result, factor))
            for row, result in zip(FOUR, (VANILLA, RAN_OUT, GHOST, NOTHING), strict=True)
        ]
        bars.breakdown_comparison(rows, tmp_path / "a.png", "light")
        for axes in figures[-1].axes:
            low, high = axes.get_xlim()
            labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
            boxes = [label.get_window_extent().padded(4) for label in labels]
            assert len(boxes) > 1
            assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])


def scaled(result: dict[str, Any], factor: int) -> dict[str, Any]:
    peak = result["peak"]
    sizes = peak and {category: size * factor for category, size in peak["categories"].items()}
    return result | {"peak": peak and peak | {"categories": sizes}}


def test_an_out_of_memory_run_has_one_figure_everywhere(figures: list[Any], tmp_path: Path) -> None:
    """Its peak, which the JSON has as well; not what was in use when memory ran out."""
    (row,) = rows_by_mode({"h": RAN_OUT})
    assert f"{row.total_bytes / MIB:.2f}" == "19.00"
    assert "Hooks (DP-SGD)                               19.00" in summary.summary_text([row])
    assert summary.describe_outcome(row).startswith("out of memory, peak 19.00 MB in backward, 50.00 MB more for noise")
    bars.breakdown_comparison([row], tmp_path / "a.png", "light")
    assert figures[0].axes[0].texts[0].get_text().startswith("19.00 MiB, ")


def test_the_timeline_starts_where_training_does(figures: list[Any], tmp_path: Path) -> None:
    timeline.timelines(FOUR, tmp_path / "a.png", "light")
    panels = figures[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "Vanilla: 42.00 MiB in backward",
        "Hooks: 19.00 MiB in backward, out of memory",
        "Ghost Clipping: 63.00 MiB in backward",
        "Flash Clipping, failed",
    ]
    assert panels[0].get_xlim() == (0, 20)
    assert len({panel.get_ylim() for panel in panels}) == 1
    (marker,) = (line for line in panels[0].lines if line.get_marker() == "v")
    assert (list(marker.get_xdata()), list(marker.get_ydata())) == ([10], [42 * MIB])
    assert [text.get_text() for text in panels[3].texts] == ["nothing was recorded"]
    assert not any(tick.get_visible() for tick in panels[3].get_xticklabels())


def test_where_memory_ran_out_is_another_place_than_the_peak(figures: list[Any], tmp_path: Path) -> None:
    timeline.timelines(FOUR, tmp_path / "a.png", "light")
    marks = {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0])
        for line in figures[0].axes[1].lines
        if line.get_marker() != "None"
    }
    assert marks == {"peak": (10, 19 * MIB), "out of memory": (20, 17 * MIB)}
    early = rows_by_mode({"h": result("hooks", {"model_parameters": 8}, None, status="out_of_memory")})
    early[0].result.out_of_memory[:] = [msgspec.structs.replace(FOUR[1].result.out_of_memory[0], event=3)]
    timeline.timelines(early, tmp_path / "a.png", "light")
    assert [line.get_label() for line in figures[1].axes[0].lines] == ["peak"]  # the other would be left of the panel
    legend = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert legend == {"model parameters", "peak", "out of memory"}
    (phases,) = (each for each in figures[0].legends if each.get_texts()[0].get_text() == "F  forward")
    assert [text.get_text() for text in phases.get_texts()] == ["F  forward", "B  backward"]


def test_phases_that_no_strip_shows_are_not_in_the_legend(figures: list[Any], tmp_path: Path) -> None:
    """Those of set-up, where only training is shown."""
    trained = result("hooks", {"model_parameters": 8})
    trained["timeline"]["phase"][0] = "setup"
    timeline.timelines(rows_by_mode({"h": trained}), tmp_path / "a.png", "light")
    names = [text.get_text() for each in figures[0].legends for text in each.get_texts()]
    assert "S  setup" not in names
    assert "B  backward" in names


def strip(panel: Any) -> dict[str, list[tuple[float, float]]]:
    """By colour, from which event to which. Only categories have labels."""
    from matplotlib.colors import to_hex

    return {
        to_hex(spans.get_facecolor()[0]): [(path.get_extents().x0, path.get_extents().x1) for path in spans.get_paths()]
        for spans in panel.collections
        if spans.get_label().startswith("_")
    }


def test_idle_gaps_in_a_backward_belong_to_its_phase(figures: list[Any], tmp_path: Path) -> None:
    interrupted = result("hooks", {"model_parameters": 8})
    interrupted["timeline"] |= {
        "event": [20, 22, 24, 26, 28, 30, 32],
        "step": [0, 0, 0, 0, 0, 1, 1],
        "phase": ["forward", "backward", "idle", "backward", "idle", "backward", "idle"],
        "bytes": [1] * 7,
        "categories": {"model_parameters": [1] * 7},
    }
    timeline.timelines(rows_by_mode({"h": interrupted}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert strip(panel) == {PHASE_COLORS["forward"]: [(0, 2)], PHASE_COLORS["backward"]: [(2, 8), (10, 12)]}
    (legend,) = (each for each in figures[0].legends if each.get_texts()[0].get_text() == "F  forward")
    assert [text.get_text() for text in legend.get_texts()] == ["F  forward", "B  backward"]


# The timeline of `result` has one row each for forward and backward, and none for the step's other phases.
EDGES = {
    "event": [19, 20, 26, 31, 33, 36],
    "time_ns": [0, 1_000_000_000, 1_600_000_000, 2_500_000_000, 3_000_000_000, 3_500_000_000],
    "step": [0, 0, 0, 0, 0, 1],
    "phase": ["idle", "forward", "backward", "noise", "optimizer_step", "zero_grad"],
}


def test_phases_are_those_of_the_edges_whatever_rows_there_are(figures: list[Any], tmp_path: Path) -> None:
    made = result("hooks", {"model_parameters": 8}, phase_edges=EDGES)
    timeline.timelines(rows_by_mode({"h": made}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert {color: spans for color, spans in strip(panel).items() if spans} == {
        PHASE_COLORS["forward"]: [(0, 6)],
        PHASE_COLORS["backward"]: [(6, 11)],
        PHASE_COLORS["noise"]: [(11, 13)],
        PHASE_COLORS["optimizer_step"]: [(13, 16)],
        PHASE_COLORS["zero_grad"]: [(16, 20)],
    }
    assert sorted(text.get_text() for text in panel.texts) == ["B", "F", "N", "O", "Z"]


def test_optimizer_steps_are_marked(figures: list[Any], tmp_path: Path) -> None:
    made = result("hooks", {"model_parameters": 8}, phase_edges=EDGES)
    timeline.timelines(rows_by_mode({"h": made}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "optimizer step"] == [13]
    names = [text.get_text() for each in figures[0].legends for text in each.get_texts()]
    assert "optimizer step" in names


def test_the_axis_can_be_seconds(figures: list[Any], tmp_path: Path) -> None:
    made = result("hooks", {"model_parameters": 8}, phase_edges=EDGES)
    made["timeline"]["time_ns"] = [0, 500_000_000, 1_000_000_000, 2_200_000_000, 5_000_000_000]
    timeline.timelines(rows_by_mode({"h": made}), tmp_path / "a.png", "light", "seconds")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == pytest.approx((0, 4))
    assert strip(panel)[PHASE_COLORS["noise"]] == [pytest.approx((1.5, 2.0))]
    assert "seconds" in panel.get_xlabel()


def proving(peak_at: int) -> dict[str, Any]:
    """A run of flash_clip: from event 20 to 30 a proof, which takes 6 of 8 MiB; then a step of ten events."""
    made = result("flash_clip", {"model_parameters": 8})
    made["timeline"]["bytes"] = [0, 0, 6 * MIB, 7 * MIB, 3 * MIB]
    made["timeline"]["bytes"][peak_at] = 8 * MIB
    made["phase_edges"] = {
        "event": [20, 30, 35],
        "time_ns": [0, 1, 2],
        "step": [0, 0, 0],
        "phase": ["proof", "forward", "backward"],
    }
    return made


def test_a_proof_is_told_and_not_drawn(figures: list[Any], tmp_path: Path) -> None:
    timeline.timelines(rows_by_mode({"f": proving(peak_at=3)}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (10, 20)
    assert "without flash_clip's proof before its first step: 10 events, up to 6.00 MiB" in panel.get_title("left")
    assert PHASE_COLORS["proof"] not in strip(panel)


def test_a_proof_that_has_the_peak_is_drawn(figures: list[Any], tmp_path: Path) -> None:
    timeline.timelines(rows_by_mode({"f": proving(peak_at=2)}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (0, 20)
    assert strip(panel)[PHASE_COLORS["proof"]] == [(0, 10)]


def test_no_phase_has_the_hue_of_a_category() -> None:
    def saturation(color: str) -> float:
        return colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))[2]

    assert max(map(saturation, PHASE_COLORS.values())) < 0.2
    assert len(set(PHASE_COLORS.values())) == len(PHASE_COLORS)


def test_the_timeline_shows_set_up_where_the_peak_is_there(figures: list[Any], tmp_path: Path) -> None:
    early = result("hooks", {"model_parameters": 8})
    early["timeline"]["bytes"][1] = 9 * MIB
    timeline.timelines(rows_by_mode({"h": early}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (-20, 20)
    assert {text.get_text().strip() for text in panel.texts} >= {"model loaded", "data prepared", "optimizer set up"}


def test_stages_of_set_up_have_names_where_there_is_room(figures: list[Any], tmp_path: Path) -> None:
    early = result("hooks", {"model_parameters": 8})
    early["timeline"]["bytes"][1] = 9 * MIB
    early["timeline"]["event"][-1] = 4000
    timeline.timelines(rows_by_mode({"h": early}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (-20, 3980)
    assert [text.get_text() for text in panel.texts] == ["B"]


def test_the_timeline_hides_set_up_that_is_a_single_row(figures: list[Any], tmp_path: Path) -> None:
    """As of a long run, whose rows are far apart."""
    long = result("hooks", {"model_parameters": 8})
    columns = [long["timeline"][key] for key in ("event", "step", "phase", "bytes")]
    for column in (*columns, *long["timeline"]["categories"].values()):
        del column[1:3]
    timeline.timelines(rows_by_mode({"h": long}), tmp_path / "a.png", "light")
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (0, 20)
    assert list(strip(panel)) == [PHASE_COLORS["backward"]]


def test_a_panel_s_limit_is_not_another_s(figures: list[Any], tmp_path: Path) -> None:
    """A small run after a large one does not cut it off."""
    rows = rows_by_mode(
        {"a": result("hooks", {"model_parameters": 100}), "b": result("hooks", {"model_parameters": 2})}
    )
    timeline.timelines(rows, tmp_path / "a.png", "light")
    assert all(panel.get_ylim()[1] >= 100 * MIB for panel in figures[0].axes)


def test_points_are_where_time_and_memory_are(figures: list[Any], tmp_path: Path) -> None:
    bars.performance_tradeoff(FOUR, tmp_path / "a.png", "light")
    (axes,) = figures[0].axes
    assert axes.collections[0].get_offsets().tolist() == [[10, 42 * MIB], [30, 63 * MIB]]
    assert {text.get_text() for text in axes.texts} == {
        "Vanilla",
        "Ghost Clipping\n1.50 x memory, 3.00 x time",
    }
    assert listed(figures[0]) == ["Hooks: out of memory", "Flash Clipping: failed"]


def listed(figure: Any) -> list[str]:
    """The lines below the axes, where no point is."""
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= figure.axes[0].get_window_extent().y0
    return [text.get_text() for text in legend.get_texts()]


def test_runs_without_times_are_memory_bars_with_the_reason(figures: list[Any], tmp_path: Path) -> None:
    """On a virtual GPU there are no times."""
    rows = rows_by_mode({"v": VANILLA | {"avg_time_ms": None}, "g": GHOST | {"avg_time_ms": None}})
    bars.performance_tradeoff(rows, tmp_path / "a.png", "light")
    bars.peak_comparison(rows, tmp_path / "b.png", "light")
    assert len(figures) == 2
    for figure in figures:
        (axes,) = figure.axes  # and no empty one for the times
        assert spans(axes) == {0: [(0, 10), (10, 12), (12, 42)], 1: [(0, 10), (10, 30), (30, 63)]}
        assert figure.get_suptitle() == "Memory without time: a virtual GPU measures no time"


def test_runs_that_all_fail_are_memory_bars_with_the_reason(figures: list[Any], tmp_path: Path) -> None:
    bars.performance_tradeoff(rows_by_mode({"h": RAN_OUT}), tmp_path / "a.png", "dark")
    (axes,) = figures[0].axes
    assert spans(axes)[0][:2] == [(0, 10), (10, 19)]
    assert figures[0].get_suptitle() == "Memory without time: no run finished"


@pytest.mark.parametrize("count", [1, 20])
def test_one_result_and_twenty(count: int, figures: list[Any], tmp_path: Path) -> None:
    found = {
        f"a_configuration_with_a_long_name_{number}": {**GHOST, "avg_time_ms": 10.0 + number} for number in range(count)
    }
    rows = rows_by_mode(found)
    for draw in (bars.breakdown_comparison, bars.performance_tradeoff):
        draw(rows, tmp_path / "a.png", "light")
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


@pytest.mark.parametrize("count", [8, 9, 54])
def test_labels_do_not_overlap_and_the_list_has_all(count: int, figures: list[Any], tmp_path: Path) -> None:
    """Of methods whose runs lie beside one another."""
    found = {
        f"c{n}": result("ghost", {"activations": 4000 + 400 * (n % 6) + 7 * (n % 5)}, 700.0 + 80 * (n % 6) + n % 7)
        for n in range(count)
    }
    bars.performance_tradeoff(rows_by_mode(found), tmp_path / "a.png", "dark")
    figure = figures[0]
    (axes,) = figure.axes
    labels = [Text.get_window_extent(label) for label in axes.texts]
    points = axes.transData.transform(axes.collections[0].get_offsets())
    radius = 4 * figure.dpi / 72
    for index, box in enumerate(labels):
        assert not any(box.overlaps(other) for other in labels[:index])
        near = [point for point in points if box.x0 - radius < point[0] < box.x1 + radius]
        assert not any(box.y0 - radius < y < box.y1 + radius for _, y in near)
    named = [name for label in axes.texts for name in label.get_text().replace("\n", " ").split(", ")]
    if count <= 8:
        assert len(named) == count
        return
    assert sorted(named, key=int) == [str(number + 1) for number in range(count)]
    (listed,) = figure.legends
    assert len(listed.get_texts()) == count
    assert all(0 <= text.get_window_extent().y0 < figure.bbox.height for text in listed.get_texts())


def test_points_on_one_another_share_a_label(figures: list[Any], tmp_path: Path) -> None:
    """Batch sizes above the physical one change neither time nor peak."""
    found = {f"c{number}": {**GHOST, "avg_time_ms": 10.0 + 10 * (number % 3)} for number in range(20)}
    bars.performance_tradeoff(rows_by_mode(found), tmp_path / "a.png", "light")
    texts = figures[0].axes[0].texts
    assert len(texts) == 3
    shown = [number for text in texts for number in text.get_text().replace("\n", " ").split(", ")]
    assert sorted(shown, key=int) == [str(number) for number in range(1, 21)]


def test_vanilla_s_name_is_visible_beside_much_slower_methods(figures: list[Any], tmp_path: Path) -> None:
    rows = rows_by_mode({"v": VANILLA, "g": GHOST | {"avg_time_ms": 5000.0}, "f": result("flash_clip", {"noise": 42})})
    bars.performance_tradeoff(rows, tmp_path / "a.png", "light")
    (axes,) = figures[0].axes
    inside = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, text
        assert inside.y0 <= box.y0 <= box.y1 <= inside.y1, text


def test_small_overheads_look_small_and_the_black_line_is_explained(figures: list[Any], tmp_path: Path) -> None:
    """4 bytes more than vanilla are no bar of the panel's width."""
    slightly = result("flash_clip", {"model_parameters": 10, "activations": 30, "gradients": 2})
    slightly["peak"]["categories"]["noise"] = 4
    bars.breakdown_comparison(rows_by_mode({"v": VANILLA, "f": slightly, "h": RAN_OUT}), tmp_path / "a.png", "light")
    right = figures[0].axes[1]
    low, high = right.get_xlim()
    assert high - low > MIB
    assert "+4 B" in {text.get_text() for text in right.texts}
    assert "all together" in {text.get_text() for text in figures[0].legends[0].get_texts()}
