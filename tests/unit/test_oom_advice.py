# SPDX-License-Identifier: Apache-2.0
"""Reports of failures on a GPU that are made by hand: what would have fitted, fragments, other processes, a leak."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from opacus.optimizers import DPOptimizer
from rich.console import Console
from torch import nn

from opacus_memprof.analysis.oom import advice, build_report, estimate
from opacus_memprof.analysis.oom.advice import advise, find_improvements, training
from opacus_memprof.analysis.oom.advice.suggestion import (
    BATCH,
    DEFECT,
    MODE,
    SMALL_BATCH,
    VARYING,
    Suggestion,
    suggest,
)
from opacus_memprof.analysis.oom.failure import (
    BlockGroup,
    Failure,
    History,
    find_evaluation,
    find_leftovers,
    read_history,
)
from opacus_memprof.analysis.verdict_view import failure_verdict
from opacus_memprof.hooks import diagnosis
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape, Program, TrainingShapes, UntrainedGraphs
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.reports.oom import exception_note, print_oom
from tests.unit.made_profiles import a_device, a_peak

M, G = 2**20, 2**30
DEVICE = 80 * G


def holding(category: str, size: int, step: int = 5, module: str = "head", phase: str = "backward") -> dict[str, Any]:
    return {
        "bytes": size,
        "blocks": 1,
        "largest": size,
        "category": category,
        "module": module,
        "op": "",
        "phase": phase,
        "step": step,
    }


def failure(requested: int, holdings: list[dict[str, Any]], **upstream: int | None) -> dict[str, Any]:
    live = sum(group["bytes"] for group in holdings)
    counts: dict[str, int | None] = {
        "reserved": live,
        "allocated": live,
        "pending": 0,
        "largest_free": 0,
        "free_segments": 0,
        "free_expandable": 0,
        "device_free": 0,
        "limit": DEVICE,
    }
    counts |= upstream
    counts.setdefault("device_total", (counts["reserved"] or 0) + (counts["device_free"] or 0))  # nobody else is there
    return {
        "number": 0,
        "requested": requested,
        "unix_ns": 0,
        "step": 5,
        "logical_step": 5,
        "device": "cuda:0",
        "category": "temp_matrices",
        "phase": "backward",
        "module": "head",
        "op": "compute_linear_grad_sample",
        "holdings": holdings,
        "upstream": counts,
    }


def linear(n: int) -> TrainingShapes:
    """One Linear of 1024 inputs and 4096 outputs, trained by Opacus on batches of n."""
    elements = 1024 * 4096
    workload = TrainingShapes(mode="hooks", optimizer="SGD")
    workload.modules["head"] = LayerShape("Linear", 4 * elements, elements, 0, 4096, 1024, True)
    workload.forwards["head"] = CaptureShape(n, 1, 4 * n * 1024, 4 * n * 4096, 4, True)
    workload.batches.append((0, n))
    return workload


def first(report: dict[str, Any]) -> dict[str, Any]:
    return report["suggestions"][0]["actions"][0]


def test_a_report_searches_the_program_once_for_each_answer() -> None:
    asked: list[str] = []
    shapes = TrainingShapes(
        untrained_graphs=lambda: asked.append("graphs") or (UntrainedGraphs("teacher", 60 * M, 2 * M, False),),  # type: ignore[func-returns-value]
        untrained_gradients=lambda: asked.append("gradients") or 0,  # type: ignore[func-returns-value]
        unclaimed_parameters=lambda: asked.append("parameters") or 0,  # type: ignore[func-returns-value]
        modules={"head": LayerShape("Linear", 4 * M, M, 0, 1024, 1024, norm_sampler=True)},
        forwards={"head": CaptureShape(8, 1, 32768, 32768, 4, True)},
        batches=deque([(0, 8)]),
    )
    holdings = [holding("unattributed", 64 * M, phase="idle"), holding("model_parameters", 4 * M)]
    report = build_report([failure(G, holdings, device_free=G // 2)], shapes)
    assert "calling teacher under torch.no_grad()" in [each.title for each in report.suggestions]
    assert sorted(asked) == ["gradients", "graphs", "parameters"]


def test_the_physical_batch_that_fits() -> None:
    """Everything but the model grows with the batch: psg = 4 · 1024 · 4096 · n bytes, twice while they are made."""
    n, sample = 512, 4 * 1024 * 4096
    kept = [holding("model_parameters", sample), holding("gradients", sample), holding("per_sample_gradients", 8 * G)]
    report = build_report([failure(8 * G, kept, device_free=0, reserved=12 * G)], linear(n))
    assert report["needed"]["bytes"] == pytest.approx(2 * n * sample, rel=0.01)
    assert report["batch"]["bytes_per_sample"] == pytest.approx(2 * sample, rel=0.01)
    best = report["batch"]["largest_that_fits"]
    assert report["batch"]["predicted_peak_bytes"] <= report["room"]["capacity_bytes"]
    assert 2 * best * sample + 3 * sample == pytest.approx(report["batch"]["predicted_peak_bytes"], rel=0.01)
    chosen = next(
        suggestion
        for suggestion in report["suggestions"]
        if suggestion["actions"][0]["kind"] == "max_physical_batch_size"
    )
    assert chosen["actions"] == [{"kind": "max_physical_batch_size", "value": best}]
    assert f"at most {best} samples instead of {n}" in chosen["title"]  # which may be a part of the logical batch
    assert chosen["saved_bytes"] == report["needed"]["bytes"] - chosen["predicted_peak_bytes"]


@pytest.mark.parametrize(
    ("program", "times", "title", "code"),
    [
        (Program(), 1, " instead of 512, and the same logical batch", "as loader:"),
        (Program(expected_samples=256), 2, " instead of 256: the model gets 2 for each sample of the loader", ""),
        (Program(expected_samples=500), 1, ": the loader asks for 500, and this Poisson batch drew 512", ""),
        (Program(expected_samples=8), 1, ": the loader asks for 8, and this Poisson batch drew 512", ""),
        (Program(expected_samples=512), 1, " instead of 512, and the same logical batch", ""),
        (Program(splits_batches=True), 1, "", "# where the program has it already"),
        (
            Program(loader="data", optimizer="sgd"),
            1,
            "",
            "data_loader=data, max_physical_batch_size={n}, optimizer=sgd",
        ),
        (Program(computes_epsilon=True), 1, "", "# and get_epsilon after the loop"),
    ],
)
def test_the_physical_batch_is_told_in_what_the_program_has(
    program: Program, times: int, title: str, code: str
) -> None:
    kept = [holding("model_parameters", 16 * M), holding("gradients", 16 * M), holding("per_sample_gradients", 8 * G)]
    shapes = linear(512)
    shapes.program = program
    report = build_report([failure(8 * G, kept, device_free=0, reserved=12 * G)], shapes)
    (advised,) = (each for each in report.suggestions if each.actions[0].kind == "max_physical_batch_size")
    n = report.batch.largest_that_fits // times
    assert advised.actions[0].value == n
    assert advised.title.startswith(f"a physical batch of at most {n} samples{title}")
    assert f"max_physical_batch_size={n}" in advised.code
    assert code.format(n=n) in advised.code


@pytest.mark.parametrize(("expected", "times"), [(500, 1), (64, 8), (8, 64)])
def test_batches_that_are_not_drawn_are_no_large_draw(expected: int, times: int) -> None:
    """Where the samples of a batch are a multiple of the loader's, the program has made them of these."""
    kept = [holding("model_parameters", 16 * M), holding("gradients", 16 * M), holding("per_sample_gradients", 8 * G)]
    shapes = linear(512)
    shapes.program, shapes.draws_poisson = Program(expected_samples=expected), False
    report = build_report([failure(8 * G, kept, device_free=0, reserved=12 * G)], shapes)
    (advised,) = (each for each in report.suggestions if each.actions[0].kind == "max_physical_batch_size")
    assert advised.actions[0].value == report.batch.largest_that_fits // times
    assert "drew" not in advised.title


@pytest.mark.parametrize(
    ("program", "batches", "change"),
    [
        (Program(), [512], BATCH),
        (Program(), [300, 512], VARYING),
        (Program(expected_samples=500), [512], VARYING),
        (Program(computes_epsilon=True), [300, 512], SMALL_BATCH),  # more of the program changes
    ],
)
def test_a_physical_batch_changes_more_where_epsilon_is_printed(
    program: Program, batches: list[int], change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, int] = {}

    def note(case: Any, instant: Any, change: int, title: str, *rest: Any, **named: Any) -> Suggestion:
        made[title[:16]] = change
        return suggest(case, instant, change, title, *rest, **named)

    monkeypatch.setattr(advice.changes, "suggest", note)
    shapes = linear(512)
    shapes.program = program
    shapes.batches = deque(enumerate(batches))
    kept = [holding("model_parameters", 16 * M), holding("gradients", 16 * M), holding("per_sample_gradients", 8 * G)]
    build_report([failure(8 * G, kept, device_free=6 * G)], shapes)
    assert made["a physical batch"] == change


@pytest.mark.parametrize(
    ("suggestions", "order"),
    [
        ([("a", MODE, True, False, 1), ("b", BATCH, True, False, 1)], "ba"),  # the smallest change
        ([("a", BATCH, True, False, 1), ("b", BATCH, True, False, 2)], "ba"),  # the largest saving
        ([("a", BATCH, True, True, 1), ("b", MODE, True, False, 1)], "ba"),  # tight ones follow
        ([("a", MODE, True, False, 1), ("b", DEFECT, True, True, 1)], "ba"),  # but for defects
        ([("a", BATCH, False, False, 1), ("b", MODE, True, True, 1)], "ba"),  # what does not fit comes last
        ([("a", BATCH, False, False, 1), ("b", MODE, False, False, 2)], "ba"),  # and whatever it changes
        ([("a", MODE, None, False, 1), ("b", BATCH, None, False, 1)], "ba"),  # nobody knows what fits
        ([("a", BATCH, True, False, 0), ("b", MODE, True, False, 1)], "b"),  # it saves nothing
    ],
)
def test_the_order_of_suggestions(suggestions: list[Any], order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        Suggestion((), title, "", "", peak=1, saved=saved, fits=fits, change=change, is_tight=is_tight)
        for title, change, fits, is_tight, saved in suggestions
    ]
    monkeypatch.setattr(advice, "ADVISERS", (lambda case: made,))
    monkeypatch.setattr(advice.training, "combine", lambda case: [])
    case: Any = SimpleNamespace(shapes=TrainingShapes())
    assert "".join(each.title for each in advise(case)) == order
    case.shapes.accumulated = 2
    monkeypatch.setattr(advice, "_ACCUMULATING_ADVISERS", ())
    assert advise(case) == []


def test_improvements_lower_the_peak_by_at_least_two_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the phases of a step 60 bytes are live, of which another mode has no 5 of gradients."""
    made = [
        Suggestion((), str(peak), "", "", peak, saved=100 - peak, fits=None, change=MODE) for peak in (99, 98, 97, 50)
    ]
    monkeypatch.setattr(advice, "estimate_step", lambda *_: object())
    monkeypatch.setattr(advice, "_IMPROVING_ADVISERS", (lambda case: made,))
    peak = a_peak(requested_bytes=100, modules={"fc": {"noise": 100}})
    between = {"idle": {"peak_bytes": 60, "categories": {"gradients": 5, "activations": 20}}}
    names, replayed = SimpleNamespace(phase=str, categories=dict), {"steps": [], "phases": {}, "timeline": []}
    predicted = [
        [
            each.predicted_peak_bytes
            for each in find_improvements("cuda:0", device, replayed, cast(Any, names), linear(4))
        ]
        for device in (a_device(steps=[{}], peak=peak, phases=between), a_device(peak=peak))
    ]
    assert predicted == [[55, 97], []]


def test_states_of_the_first_step_are_part_of_the_need() -> None:
    n, sample = 512, 4 * 1024 * 4096
    kept = [holding("model_parameters", sample), holding("per_sample_gradients", 8 * G)]
    besides = []  # what does not grow with the batch
    for states in (0, 2):
        shapes = linear(n)
        shapes.state_tensors = states
        batch = build_report([failure(8 * G, kept, device_free=0, reserved=12 * G)], shapes)["batch"]
        besides.append(batch["predicted_peak_bytes"] - 2 * batch["largest_that_fits"] * sample)
    assert besides[1] - besides[0] == pytest.approx(2 * sample, rel=0.01)


def test_fragments() -> None:
    kept = [holding("teacher", 60 * G, step=0, phase="idle")]
    report = build_report([failure(6 * G, kept, reserved=70 * G, largest_free=2 * G, device_free=G)], TrainingShapes())
    assert first(report) == {"kind": "allocator_setting", "value": "expandable_segments:True"}
    assert report["suggestions"][0]["fits"]
    assert report["room"]["cached_bytes"] == 10 * G
    pending = failure(6 * G, kept, reserved=70 * G, pending=4 * G)  # freed, while a side stream uses it
    assert build_report([pending], TrainingShapes())["room"]["cached_bytes"] == 6 * G
    expandable = failure(6 * G, kept, reserved=70 * G, largest_free=2 * G, free_expandable=10 * G)
    assert build_report([expandable], TrainingShapes())["suggestions"] == []
    not_enough = failure(20 * G, kept, reserved=70 * G, largest_free=2 * G)
    assert build_report([not_enough], TrainingShapes())["suggestions"] == []


def test_another_process() -> None:
    kept = [holding("teacher", 20 * G, step=0, phase="idle")]
    report = build_report([failure(10 * G, kept, device_free=2 * G, device_total=DEVICE)], TrainingShapes())
    assert first(report)["kind"] == "other_processes"
    assert report["room"]["others_bytes"] == DEVICE - 2 * G - 20 * G
    assert report["suggestions"][0]["fits"]
    # What is left of the device is this process' context.
    alone = failure(10 * G, [holding("teacher", 76 * G, step=0, phase="idle")], device_free=2 * G, device_total=DEVICE)
    assert build_report([alone], TrainingShapes())["suggestions"] == []


def before_training(requested: int, live: int = 93 * M, **upstream: int) -> OomReport:
    kept = [holding("teacher", live, step=0, phase="idle")]
    failed = failure(requested, kept, device_total=DEVICE, **upstream) | {"step": 0, "logical_step": 0, "phase": "idle"}
    return build_report([failed], TrainingShapes())


def test_memory_that_was_free_again() -> None:
    """Another process has freed memory between the failure and the moment when the device is asked."""
    report = before_training(64 * M, reserved=94 * M, device_free=80 * M)
    verdict = failure_verdict(report)
    assert verdict.where == "before the first training step, cuda:0"
    assert verdict.lines[1][1] == "needs 157.00 MiB · room for 166.98 MiB a moment later"
    assert first(report)["kind"] == "other_processes"
    assert "80.00 MiB were free a moment after the allocation of 64.00 MiB failed" in verdict.fixes[0].title
    assert (verdict.fixes[0].effect, verdict.fixes[0].peak) == ("fits", "157.00 MiB")


def test_few_fragments_where_the_step_would_fit() -> None:
    """The allocator takes 20 MiB for a block of 5 MiB, and the device has 19."""
    report = before_training(5 * M, reserved=94 * M, device_free=19 * M)
    assert first(report)["kind"] == "allocator_setting"
    assert failure_verdict(report).lines[1][1].endswith(" in fragments")


@pytest.mark.parametrize(
    ("requested", "free", "again"),
    [
        (M, 2 * M, True),
        (M, 2 * M - 1, False),
        (5 * M, 20 * M, True),
        (5 * M, 20 * M - 1, False),
        (21 * M, 22 * M, True),
        (21 * M, 22 * M - 1, False),
    ],
)
def test_the_allocator_takes_whole_blocks_of_the_device(requested: int, free: int, again: bool) -> None:
    report = before_training(requested, live=9 * M, device_free=free)
    assert [each.title.partition(" ")[0] for each in report.suggestions] == ["running"] * again


def test_a_limit_of_the_process_is_no_other_process() -> None:
    kept = [holding("teacher", 20 * G, step=0, phase="idle")]
    report = build_report(
        [failure(10 * G, kept, device_free=60 * G, device_total=DEVICE, limit=25 * G)], TrainingShapes()
    )
    assert report["suggestions"] == []
    assert report["room"]["limit_bytes"] == 25 * G


def test_what_steps_have_left_behind() -> None:
    leaked = [holding("forward_undecided", G, step=step, phase="forward") for step in range(5)]
    kept = [holding("model_parameters", G, step=0, phase="idle"), *leaked, holding("forward_undecided", 3 * G)]
    report = build_report([failure(2 * G, kept)], TrainingShapes())
    assert report["left_behind"]["bytes"] == 5 * G
    assert report["left_behind"]["steps"] == [0, 1, 2, 3, 4]
    assert first(report) == {"kind": "let_go", "categories": ["activations"], "modules": ["head"]}
    assert report["suggestions"][0]["saved_bytes"] == 5 * G
    # What two steps have made is not a leak: each may still use what the one before has left.
    two = [group for group in kept if group["step"] in (0, 4, 5)]
    assert build_report([failure(2 * G, two)], TrainingShapes())["left_behind"]["bytes"] == 0


@pytest.mark.parametrize(
    ("category", "steps", "size", "leaks"),
    [
        ("forward_undecided", (0, 1, 2), G, True),
        ("forward_undecided", (1, 2), G, False),  # the first step let go of its own: it is a window that moves
        ("forward_undecided", (0, 1, 2), G // 64, False),  # a little of what else is live
        ("inputs", (0, 1, 2), G, False),  # batches may be loaded ahead
        ("unattributed", (0, 1, 2), G, False),
    ],
)
def test_what_the_first_two_steps_have_left_behind(
    category: str, steps: tuple[int, ...], size: int, leaks: bool
) -> None:
    kept = [holding("model_parameters", G, step=0, phase="idle")]
    kept += [holding(category, size, step=step, phase="forward") for step in steps]
    failed = failure(2 * G, kept) | {"step": 3, "logical_step": 3}
    assert build_report([failed], TrainingShapes())["left_behind"]["bytes"] == leaks * len(steps) * size


def group(
    size: int, category: str, step: int = 5, blocks: int = 1, op: str = "", phase: str = "backward"
) -> BlockGroup:
    return BlockGroup(size, blocks, size // blocks, category, "fc", op, phase, step)


def failed_in_step_5(*groups: BlockGroup, phase: str = "backward") -> Failure:
    return Failure(0, "cuda:0", 1, "noise", "", "", phase, 5, 5, 0, groups, {})


@pytest.mark.parametrize(
    ("groups", "given", "left"),
    [
        ([group(400, "activation_hooks"), group(900, "noise")], {"captures": {"fc": 4, "head": 2}}, 300),
        (
            [group(400, "activation_hooks"), group(600, "activations", blocks=3), group(200, "activations", blocks=2)],
            {"stray_samples": (3, 5)},
            500,
        ),
        ([group(600, "activations", blocks=4), group(500, "activations", step=4, blocks=9)], {"waiting": 5}, 480),
        ([group(600, "activations", blocks=3)], {"waiting": 5}, 0),  # fewer blocks than passes
        ([group(600, "activations", blocks=4), group(601, "noise")], {"waiting": 5}, 0),  # most is another's
        ([group(600, "activations", blocks=4)], {"waiting": 4}, 0),  # as of pairs
        ([group(800, "unattributed", blocks=8)], {}, 700),
        ([group(700, "unattributed", blocks=7)], {}, 0),
        ([group(800, "unattributed", step=4, blocks=8)], {}, 0),
        ([group(800, "noise", blocks=8)], {}, 0),
        ([group(808, "unattributed", blocks=8)], {}, 0),  # of no weight's size
        ([group(9, "noise", step=step) for step in (1, 2, 3, 4)], {}, 36),
        ([group(9, "noise", step=step) for step in (2, 3, 4)], {}, 0),  # the last step's may still be used
        ([group(9, "noise", step=step, phase="idle") for step in (0, 1, 2)], {}, 0),  # made before the training
        ([group(9, "noise", step=step, phase="forward") for step in (0, 1, 2)], {}, 27),
        ([group(9, "model_parameters", step=step) for step in (1, 2, 3)], {}, 0),
        ([group(900, "activations", step=step, phase="forward") for step in (0, 1)], {}, 0),  # later steps left none
    ],
)
def test_what_should_have_been_released(groups: list[BlockGroup], given: dict[str, Any], left: int) -> None:
    arguments = {"captures": {}, "stray_samples": (), "samples": 8, "weights": {100}, **given}
    found = find_leftovers(failed_in_step_5(*groups), **arguments)
    assert found.bytes == sum(found.by_module.values()) == left
    earlier = {} if given else {each.category: left for each in groups if each.step < 5 and left}
    assert found.from_before(5) == earlier


def test_only_steps_that_ended_are_steps_of_the_history() -> None:
    names: Any = SimpleNamespace(phase=["forward", "backward"].__getitem__, categories=lambda sizes: sizes)
    rows = [
        {"step": step, "phase": step % 2, "categories": {"activations": 10 * step}, "complete": step != 2}
        for step in range(6)
    ]
    history = read_history({"steps": rows, "phases": {0: rows[1]}, "timeline": rows}, names, 4)
    assert [each.step for each in history.step_peaks] == [0, 1, 3]
    assert [each.step for each in history.peaks] == [1, 0, 1, 2, 3, 4]
    assert history.most_activations == 40
    assert read_history(None, names, 4) == read_history({}, None, 4) == History()


def test_forwards_whose_captures_decide_the_size_of_gradients() -> None:
    shapes = TrainingShapes(unreleased=deque([8, 6, 4]), batches=deque([(0, 8), (3, 4)]))
    assert shapes.stray_samples == (8, 6)
    assert TrainingShapes(unreleased=deque([8, 6, 9])).stray_samples == ()  # the latest batch is the largest
    assert TrainingShapes(unreleased=deque([8, 6, 4]), released=3).stray_samples == ()
    assert TrainingShapes().stray_samples == ()
    assert [shapes.batch_size_in(step) for step in (-1, 0, 2, 3, 9)] == [None, 8, 8, 4, 4]


@pytest.mark.parametrize(
    ("phase", "waiting", "evaluated", "found"),
    [("forward", 1, 51, (4, True)), ("forward", 1, 50, None), ("backward", 1, 99, None), ("idle", None, 99, None)],
)
def test_an_evaluation_in_training_mode(phase: str, waiting: int | None, evaluated: int, found: Any) -> None:
    shapes = TrainingShapes(waiting=waiting, batches=deque([(0, 4)]))
    made = [group(evaluated, "activations", op="train.py:3 in evaluate"), group(100 - evaluated, "activations")]
    assert find_evaluation(failed_in_step_5(*made, group(900, "noise"), phase=phase), shapes) == found


def test_convolutions_as_an_h200_measured_them() -> None:
    """The planted convolutions ran out of memory under hooks, where the second one's input is unfolded.

    flash_clip then peaked at 5 561 811 119 bytes, in the second one's backward, where cuDNN has a layout of its own.
    """
    n, positions, image = 96, 192 * 192, 96 * 192 * 192 * 4
    workload = TrainingShapes(mode="hooks", optimizer="SGD", multiprocessors=132)
    workload.modules |= {
        "0": LayerShape("Conv2d", 4 * 1792, 1728, 64, 64, 27, False, kernel_positions=9),
        "1": LayerShape("GroupNorm", 4 * 128, 64, 64, 0, 0, False),
        "3": LayerShape("Conv2d", 4 * 36928, 36864, 64, 64, 576, False, kernel_positions=9),
        "7": LayerShape("Linear", 4 * 102500, 102400, 100, 100, 1024, True),
    }
    workload.forwards |= {
        "0": CaptureShape(n, positions, 3 * image, 64 * image, 4, True, True),
        "1": CaptureShape(n, 64 * 192, 64 * image, 64 * image, 4, False),
        "3": CaptureShape(n, positions, 64 * image, 64 * image, 4, False, True),
        "7": CaptureShape(n, 1, 4 * n * 1024, 4 * n * 100, 4, False),
    }
    workload.batches.append((0, n))
    workload.flash_clip_refusal = lambda: None
    kept = [
        holding("activation_hooks", 64 * image, 0, "0", "forward"),
        holding("activation_hooks", 64 * image, 0, "2", "forward"),
        holding("backprop_copies", 64 * image, 0, "3"),
        holding("backward_temporaries", 64 * image, 0, "3"),
        holding("backward_temporaries", 64 * image, 0, "4"),
        holding("temp_matrices", 924942336, 0, "3"),
        holding("library_workspace", 68157440, 0, "7"),
        holding("per_sample_gradients", 39360000, 0, "7"),
        holding("inputs", 42467328, 0, "", "idle"),
        holding("model_parameters", 565392, 0, "", "idle"),
        holding("gradients", 557712, 0, "7"),
    ]
    failed = failure(9 * 64 * image, kept) | {"step": 0, "logical_step": 0, "module": "3"}
    wanted = [{"kind": "grad_sample_mode", "value": "flash_clip"}]
    flash_clip = next(
        suggestion for suggestion in build_report([failed], workload)["suggestions"] if suggestion["actions"] == wanted
    )
    assert "in backward of 3" in flash_clip["computed"]
    assert flash_clip["predicted_peak_bytes"] == pytest.approx(5_561_811_119, rel=1e-4)


def test_norms_without_squares_as_an_h200_measured_them() -> None:
    """Five Linears of 8192 tokens in ghost clipping.

    With norms in tiles they peaked at 1 467 897 004 bytes, where a bias' sum over tokens takes 132 MiB.
    """
    n, wide, small = 12, 12 * 8192 * 256 * 4, 12 * 8192 * 64 * 4
    workload = TrainingShapes(mode="ghost", optimizer="SGD", multiprocessors=132)
    workload.flash_clip_refusal = lambda: None
    for name, rows in (("0", 256), ("2", 256), ("4", 256), ("6", 256), ("8", 64)):
        workload.modules[name] = LayerShape("Linear", 4 * 257 * rows, 256 * rows, rows, rows, 256, True)
        workload.forwards[name] = CaptureShape(n, 8192, wide, wide * rows // 256, 4, name == "0")
    workload.batches.append((0, n))
    kept = [holding("activations", wide, 0, str(module), "forward") for module in range(8)]
    kept += [holding("activations", small, 0, module, "forward") for module in ("8", "")]
    kept += [
        holding("inputs", wide + 8 * 8192 * n, 0, "", "idle"),
        holding("library_workspace", 68157440, 0, "8"),
        holding("model_parameters", 1118464, 0, "", "idle"),
        holding("backward_temporaries", wide, 0, "8"),
        holding("backward_temporaries", small, 0, "8"),
        holding("backprop_copies", small, 0, "8"),
    ]
    failed = failure(8192 * 8192 * 4 * n, kept) | {"step": 0, "logical_step": 0, "module": "8"}
    wanted = [{"kind": "register_norm_samplers"}]
    tiles = next(
        suggestion for suggestion in build_report([failed], workload)["suggestions"] if suggestion["actions"] == wanted
    )
    assert tiles["predicted_peak_bytes"] == pytest.approx(1_467_897_004, rel=1e-4)


def test_nobody_counts() -> None:
    nothing = dict.fromkeys(failure(1, [])["upstream"])
    report = build_report([failure(G, [holding("teacher", 2 * G)], **nothing)], TrainingShapes())
    assert report["room"]["capacity_bytes"] == 2 * G  # that much has fitted
    assert report["room"]["may_reserve_bytes"] is None
    text(report)


def test_nothing_is_live_at_all() -> None:
    report = build_report([failure(G, [])], TrainingShapes())
    assert (report["live_bytes"], report["needed"]["bytes"]) == (0, G)
    assert "No known change" in text(report)


def text(report: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_oom(report, console)
    return console.export_text()


def test_reports_show_names_as_they_are() -> None:
    name = "model[0].<b>x</b>." + "very_long_name." * 12
    kept = [holding("[red]mine[/red]", G, module=name)]
    report = build_report([failure(G, kept) | {"module": name}], TrainingShapes())
    assert "[red]mine[/red]" in text(report, 300)
    assert name in text(report, 500)
    assert name in exception_note(report, "oom_report.txt")


def test_lines_for_reentrant_checkpoints_take_arguments_by_name() -> None:
    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return super().forward(x * scale).tanh()

    plain = torch.nn.ModuleList([Block(3, 3) for _ in range(3)])
    model = copy.deepcopy(plain)
    case: Any = SimpleNamespace(shapes=TrainingShapes(program=Program(model="model")))
    exec(advice.training._checkpoint_code(case, ["0", "1", "2"], reentrant=True), {"model": model})
    for blocks in (plain, model):
        x = torch.ones(2, 3, requires_grad=True)
        for block in blocks:
            x = block(x, scale=0.5)
        x.sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("block", [M, 2 * M])
def test_features_around_adapters_are_not_taken_for_an_attention_matrix(block: int) -> None:
    """Tokens by tokens for one sample in float32 are 64 KiB here: both are multiples of it."""
    shapes = {
        "self.query.A": CaptureShape(4, 128, M, 2**16, 4, from_leaf=False),
        "self.query.B": CaptureShape(4, 128, 2**16, M, 4, from_leaf=False),
    }
    saved = estimate._saved_by_name({"self": block}, {"self": block}, list(shapes), shapes)
    assert saved.largest_squares == ({"self.query.B": block} if block > M else {})
    shapes["self.query.B"] = replace(shapes["self.query.B"], output_bytes=block)  # a sum with what the adapter adds
    assert not estimate._saved_by_name({"self": block}, {"self": block}, list(shapes), shapes).largest_squares


def test_gradients_of_trained_parameters_alone_are_dropped() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=0, max_grad_norm=1, expected_batch_size=1
    )
    shapes = linear(512)
    kept = [holding("model_parameters", 4 * 1024 * 4096), holding("per_sample_gradients", 8 * G)]
    suggestions = build_report([failure(8 * G, kept, device_free=0, reserved=12 * G)], shapes)["suggestions"]
    (code,) = (each["code"] for each in suggestions if each["actions"][0]["kind"] == "drop_gradients")
    exec(code, {"optimizer": optimizer})
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


class Pretrained(nn.Linear):
    def gradient_checkpointing_enable(self, options: dict[str, bool]) -> None:
        self.options = options


@pytest.mark.parametrize(("model", "name"), [(Pretrained(2, 2), ""), (nn.Sequential(nn.ReLU(), Pretrained(2, 2)), "1")])
def test_checkpoints_are_enabled_where_the_model_has_the_method(
    model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_models", {model: None})
    shapes = TrainingShapes()
    diagnosis.observe_program(shapes)
    assert shapes.program.enables_checkpoints == name
    case = cast(Any, SimpleNamespace(shapes=replace(shapes, program=replace(shapes.program, model="model"))))
    exec(training._checkpoint_code(case, [], reentrant=True), {"model": model})
    assert cast(Pretrained, model.get_submodule(name)).options == {"use_reentrant": True}
