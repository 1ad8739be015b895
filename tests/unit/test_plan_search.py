# SPDX-License-Identifier: Apache-2.0
"""The search for the largest value that fits, against trying every value on made-up peaks."""

import contextlib
import io
import json
import random
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.progress import ProgressBoard
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram, Range
from opacus_memprof.planning.draws import LargestBatch, assess_draws
from opacus_memprof.planning.report import show_run
from opacus_memprof.planning.runs import PlannedRuns, open_runs
from opacus_memprof.planning.table import PlannedCell, Point, fill, largest, next_value
from opacus_memprof.planning.verdict import LARGEST_MEMORY, Verdict, check_run, judge, least_memory, memory_of
from opacus_memprof.planning.virtual_run import VirtualRun, _read
from opacus_memprof.virtual_gpu.devices import GPUS

ROOM = 80 * 2**30
Peaks = Callable[[random.Random], Callable[[int], int]]
_MIB = 2**20
_STEP = 2 * 2**20  # what a caching allocator takes at least


def _linear(rng: random.Random) -> Callable[[int], int]:
    base, slope = rng.randrange(2**30), rng.randrange(2**20, 2**30)
    return lambda n: base + slope * n


def _piecewise_linear(rng: random.Random) -> Callable[[int], int]:
    """The largest of several lines, as the instants of a step are."""
    lines = [(rng.randrange(60 * 2**30), rng.randrange(2**30)) for _ in range(4)]
    return lambda n: max(base + slope * n for base, slope in lines)


def _measured(requested: int, waste: float) -> Point:
    """Memory runs out where requested bytes do; a run may reserve more, until it has to give that back.

    It runs out at the first of 16 allocations for which too little is left.
    """
    reserved = -(-int(requested * waste) // _STEP) * _STEP
    if reserved <= ROOM:
        return Point(True, requested, reserved, ROOM)
    allocation = -(-requested // 16)
    wanted = 0 if requested <= ROOM else allocation * (ROOM // allocation + 1)
    return Point(not wanted, requested, min(requested, ROOM), ROOM, retries=1, wanted=wanted)


@pytest.mark.parametrize("kind", [_linear, _piecewise_linear])
@pytest.mark.parametrize("waste", [1.0, 1.04])
def test_it_finds_what_trying_all_finds(kind: Peaks, waste: float) -> None:
    """The very value, by few runs; where cached memory is given back and runs foretold too little, to 1 %."""
    runs = []
    for seed in range(150):
        rng = random.Random(seed)
        peak, low, high = kind(rng), rng.choice([1, 3, 64]), 4096
        points = _searched(lambda value, peak=peak: _measured(peak(value), waste), low, high)
        tried = [value for value in range(low, high + 1) if peak(value) <= ROOM]
        answer, most = largest(points), max(tried, default=None)
        assert answer == most or (len(points) > 8 and answer and most and 0.99 * most <= answer < most)
        runs.append(len(points))
    assert max(runs) <= 16
    assert sum(runs) <= 7.6 * len(runs)


def _parabola(rng: random.Random) -> Callable[[int], int]:
    """Bytes by the length of sequences, with attention matrices; they end at a length from 100 to 8000."""
    base, end, square = rng.randrange(10 * 2**30), rng.uniform(100, 8000), rng.uniform(0.05, 1)
    return lambda n: base + int((ROOM - base) * ((1 - square) * n / end + square * (n / end) ** 2))


def test_eight_runs_find_a_length() -> None:
    """Where memory grows with the square of the searched value, in part."""
    runs = []
    for seed in range(150):
        rng = random.Random(seed)
        peak, low = _parabola(rng), rng.choice([1, 3, 64])
        points = _searched(lambda value, peak=peak: _measured(peak(value), 1.0), low, 16384)
        answer = largest(points)
        assert answer is not None
        assert peak(answer) <= ROOM < peak(answer + 1)
        runs.append(len(points))
    assert max(runs) <= 16
    assert sum(runs) <= 7.5 * len(runs)
    assert sum(each > 8 for each in runs) <= 0.06 * len(runs)


def _searched(measure: Callable[[int], Point], low: int, high: int) -> dict[int, Point]:
    points: dict[int, Point] = {}
    while value := next_value(points, low, high):
        assert low <= value <= high
        assert value not in points
        points[value] = measure(value)
    return points


@given(
    limit=st.integers(0, 5000),
    base=st.integers(0, ROOM - 1),
    cached=st.floats(0.01, 1.0),
    held=st.floats(0.5, 1.0),
    luck=st.sets(st.integers(1, 5000), max_size=40),
)
def test_the_answer_is_what_was_proved(limit: int, base: int, cached: float, held: float, luck: set[int]) -> None:
    """No smaller run has failed, and the next larger one fails and is not far.

    However little runs foretell, and where single values fit or fail out of line.
    """

    def measure(value: int) -> Point:
        fits = (value <= limit) != (value in luck)
        requested = int(base + (ROOM - base) * held * min(1.0, value / (limit + 1)))
        flushed = not fits or requested > cached * ROOM
        return Point(fits, requested, ROOM if flushed else requested, ROOM, int(flushed), 0 if fits else ROOM + value)

    points = _searched(measure, 1, 4096)
    answer = largest(points)
    assert len(points) <= 16
    if answer is None:
        assert not points[1].fits
        return
    assert points[answer].fits
    bad = min((value for value, point in points.items() if not point.fits), default=4097)
    assert answer < bad
    assert bad - answer <= max(1, answer // 100) or len(points) == 16


def _in_pieces(value: int, sample: int, waste: float) -> Point:
    """Returns the reserved bytes, by the rules of torch's allocator.

    A cached tensor of 128 KiB for each value was allocated in pieces of 2 MiB; one that is 64 KiB larger fits into
    these, or takes as many bytes again.
    """
    tensor = value * 128 * 2**10
    fits_there = -(-tensor // _STEP) * _STEP >= tensor + 64 * 2**10
    requested = value * sample + (0 if fits_there else tensor)
    reserved = int((value * sample + tensor) * waste)
    wanted = 0 if requested <= ROOM else requested
    return Point(not wanted, requested, min(reserved, ROOM), ROOM, int(reserved > ROOM), wanted)


def test_no_round_value_up_to_the_answer_fails() -> None:
    """The search agrees with trying every value.

    It answers 2591 instead of 2936 for a convolution, where all multiples of 16 from 2592 to 2928 run out of memory
    and all values between them fit.
    """
    smaller = 0
    for seed in range(40):
        rng = random.Random(seed)
        sample, waste = rng.randrange(20 * 2**20, 200 * 2**20), rng.uniform(1.0, 1.2)
        points = _searched(lambda value, sample=sample, waste=waste: _in_pieces(value, sample, waste), 1, 4096)
        fitting = [value for value in range(1, 4097) if _in_pieces(value, sample, waste).fits]
        failing = min(set(range(16, 4097, 16)) - set(fitting), default=4097)
        answer = largest(points)
        assert answer is not None
        assert 0.99 * max(value for value in fitting if value < failing) <= answer < failing
        assert len(points) <= 16
        smaller += answer != fitting[-1]
    assert smaller > 1


def test_nothing_is_run_twice_where_nothing_grows() -> None:
    points: dict[int, Point] = {}
    asked = []
    while value := next_value(points, 1, 4096):
        asked.append(value)
        points[value] = _measured(2**30, 1.0)
    assert asked == [1, 80, 4096]  # 80 would be the largest if all of the 1 GiB grew with the value


def test_no_smaller_value_than_the_answer_has_failed() -> None:
    """Also where larger ones fit again, as fragments have it."""
    points: dict[int, Point] = {}
    while value := next_value(points, 1, 100):
        fits = value < 40 or 50 <= value < 60
        points[value] = Point(fits, value * 2**30, min(value * 2**30, ROOM), ROOM)
    best = largest(points)
    assert best is not None
    assert 36 <= best < 40
    assert all(point.fits for value, point in points.items() if value <= best)


@pytest.mark.parametrize("flushes", [False, True])
def test_few_runs_are_needed_where_reserved_bytes_bend(flushes: bool) -> None:
    """As measured of a GPT-2: requested bytes are a line, and what lies idle grows from 4 to 13 % of them."""
    base, slope = 3 * 2**30, 600 * 2**20
    points: dict[int, Point] = {}
    while value := next_value(points, 1, 1024):
        requested = base + slope * value
        reserved = int(requested * (1.04 + 0.09 * min(1, requested / ROOM)))
        if reserved > ROOM and flushes:
            held = int(requested * 1.06)
            points[value] = Point(held <= ROOM, requested, min(held, ROOM), ROOM, 1, held if held > ROOM else 0)
        else:
            wanted = reserved if reserved > ROOM else 0
            points[value] = Point(not wanted, requested, min(reserved, ROOM), ROOM, wanted=wanted)
    best = largest(points)
    assert best is not None
    assert not points[best + 1].fits
    assert len(points) <= (9 if flushes else 5)  # the round value below it among them


def test_a_run_that_does_not_fit_foretells_the_limit() -> None:
    """Of 8 GiB and 100 MiB for each sample, of which 20 MiB more are in fragments: 614 samples fit into 80 GiB."""
    mib, base = 2**20, 8 * 2**30
    points = {
        300: Point(True, base + 30_000 * mib, base + 36_000 * mib, ROOM),
        600: Point(True, base + 60_000 * mib, ROOM, ROOM, 1),
        700: Point(False, base + 70_000 * mib, ROOM, ROOM, 1, base + 84_000 * mib),
    }
    assert next_value(points, 300, 4096) == 614


class _ClosedForms:
    """Runs whose memory is known: `slope` MiB for each sample, of ROOM. Those of the GPU `slow` end later."""

    workers = 2

    def __init__(self, slow: str = "") -> None:
        self.slow = slow

    def start(self, configuration: PlannedConfiguration) -> "Future[VirtualRun]":
        changes, arguments = configuration.changes, configuration.program.arguments
        batch = changes[-1]["value"] if changes else int(arguments[-1].rpartition("=")[2])
        requested = batch * int(configuration.gpu) * 2**20
        fits = requested <= ROOM
        sizes = {"requested": requested, "reserved": min(requested, ROOM), "may_reserve": ROOM, "context": 0}
        known = {"error": "", "steps": 1, "samples": batch, "retries": 0, "seconds": 1.0, "directory": ""}
        largest = dict.fromkeys(("category", "module", "phase"), "")
        run: Future[VirtualRun] = Future()
        result = VirtualRun(fits, "finished" if fits else "out_of_memory", **known, **sizes, **largest)
        threading.Timer(0.01 * (configuration.gpu == self.slow), run.set_result, [result]).start()
        return run

    def keep(self, configuration: PlannedConfiguration, run: VirtualRun) -> None:
        pass

    def all(self, configurations: Sequence[PlannedConfiguration]) -> list[VirtualRun]:
        return [self.start(each).result() for each in configurations]


def test_each_cell_is_searched_to_its_end() -> None:
    slopes = (16, 512, 3000, ROOM // _MIB + 1)
    cells = [PlannedCell(None, PlannedConfiguration(PlannedProgram("train.py"), str(slope))) for slope in slopes]
    fill(cast(PlannedRuns, _ClosedForms()), cells, Range("batch", 1, 4096), lambda count: None)
    assert [cell.largest for cell in cells] == [min(ROOM // (slope * _MIB), 4096) or None for slope in slopes]
    assert [cell.error[:24] for cell in cells] == ["", "", "", "not even batch=1 fits in"]


def test_the_same_values_are_run_whichever_cell_ends_first() -> None:
    """Otherwise a plan that is resumed would ask for other runs than it has."""
    tried = []
    for slow in ("16", "512"):
        cells = [PlannedCell(None, PlannedConfiguration(PlannedProgram("train.py"), gpu)) for gpu in ("16", "512")]
        fill(cast(PlannedRuns, _ClosedForms(slow)), cells, Range("batch", 1, 9999), lambda count: None)
        tried.append([sorted(cell.runs) for cell in cells])
    assert tried[0] == tried[1]


def test_closing_cancels_runs_that_wait_in_an_executor(tmp_path: Path) -> None:
    executor, busy = ThreadPoolExecutor(1), threading.Event()
    executor.submit(busy.wait)
    try:
        runs = PlannedRuns(tmp_path, 1, lambda *about: None, executor)  # type: ignore[arg-type]
        waiting = runs.start(PlannedConfiguration(PlannedProgram(__file__), "t4"))
        runs.close()
        assert waiting.cancelled()
    finally:
        busy.set()


def test_killed_runs_are_run_again_and_only_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more at once, since the machine may have had no memory left, and in each plan that is resumed."""
    begun: list[str] = []

    def run_virtually(configuration: PlannedConfiguration, directory: Path, *about: Any) -> VirtualRun:
        begun.append(name := configuration.program.arguments[0])
        directory.mkdir(parents=True, exist_ok=True)
        status = "killed" if name == "always" or begun.count("once") == 1 else "finished"
        return VirtualRun(status == "finished", status, "", 1, 1, 1, 1, 1, 1, 0, "", "", "", 1.0, str(directory))

    monkeypatch.setattr("opacus_memprof.planning.runs.run_virtually", run_virtually)
    monkeypatch.setattr("opacus_memprof.planning.runs.ForkedRuns", lambda environment: SimpleNamespace(close=int))
    script = tmp_path / "train.py"
    script.write_text("")
    asked = [PlannedConfiguration(PlannedProgram(str(script), (name,)), "t4") for name in ("once", "always")]
    everything = ["once", "once", "always", "always"]
    for expected in (everything, ["always", "always"], everything):
        begun.clear()
        with open_runs(tmp_path / "plan", resume=True, on_end=lambda *ended: None) as runs:
            found = [runs.all([each])[0].status for each in asked]
        assert (found, begun) == (["finished", "killed"], expected)
        if expected != everything:
            shutil.rmtree(tmp_path / "plan" / "runs")  # with what reports read


def test_drawn_batches_are_searched_and_their_peaks_computed() -> None:
    """Of 744 MiB a sample, 110 fit."""
    configuration = PlannedConfiguration(PlannedProgram("train.py"), "744")
    run = cast(VirtualRun, SimpleNamespace(fits=True, poisson={"samples": 1000, "rate": 0.1}))
    draws = assess_draws(cast(PlannedRuns, _ClosedForms()), configuration, run, 10, lambda count: None)
    assert (draws.fits, draws.physical) == (110, 110)
    assert draws.probability == LargestBatch(1000, 0.1, 10).probability_above(110)
    sizes = {each: LargestBatch(1000, 0.1, 10).quantile(each) for each in (0.5, 0.9, 0.99, 0.999999)}
    assert draws.peaks == {each: (size, size * 744 * 2**20) for each, size in sizes.items()}


def test_one_sample_is_tried_where_the_mean_does_not_fit() -> None:
    configuration = PlannedConfiguration(PlannedProgram("train.py"), str(ROOM // 2**20))
    run = cast(VirtualRun, SimpleNamespace(fits=False, poisson={"samples": 1000, "rate": 0.1}))
    assert assess_draws(cast(PlannedRuns, _ClosedForms()), configuration, run, 10, lambda count: None).fits == 1


def test_the_search_ends_at_the_largest_likely_batch() -> None:
    configuration = PlannedConfiguration(PlannedProgram("train.py"), "1")
    run = cast(VirtualRun, SimpleNamespace(fits=True, poisson={"samples": 1000, "rate": 0.1}))
    draws = assess_draws(cast(PlannedRuns, _ClosedForms()), configuration, run, 10, lambda count: None)
    assert (draws.fits, draws.probability) == (LargestBatch(1000, 0.1, 10).quantile(1 - 1e-9), 0.0)


def test_an_interrupt_ends_the_search_for_a_drawn_batch() -> None:
    rounds = []

    def begin(count: int) -> None:
        rounds.append(count)
        if len(rounds) == 3:  # not again, in the search for a physical batch
            raise KeyboardInterrupt

    configuration = PlannedConfiguration(PlannedProgram("train.py"), "744")
    run = cast(VirtualRun, SimpleNamespace(fits=True, poisson={"samples": 1000, "rate": 0.1}))
    with pytest.raises(KeyboardInterrupt):
        assess_draws(cast(PlannedRuns, _ClosedForms()), configuration, run, 10, begin)


def test_advice_is_tried_and_what_fits_comes_first() -> None:
    """Of six suggestions four: two need an edit, one fails, and one of a single sample is not tried any more.

    One that needs an edit and is predicted not to fit is left out.
    """
    four, eight, two, one = ({"kind": "max_physical_batch_size", "value": size} for size in (4, 8, 2, 1))
    actions: list[list[dict[str, Any]]] = [
        *([{"kind": "edit"}], [{"kind": "grad_sample_mode", "value": "ghost"}], [four]),
        *([eight, {"kind": "edit"}], [two], [one]),
    ]
    suggestions = [
        {"title": str(n), "code": "", "predicted_peak_bytes": n, "actions": each, "fits": n < 3}
        for n, each in enumerate(actions)
    ]
    report = {"suggestions": suggestions, "needed": {"bytes": 900}}
    ran_out = {"status": "out_of_memory", "requested": 1, "reserved": 1, "may_reserve": 1000, "context": 300}
    asked = []

    def run_all(configurations: Sequence[PlannedConfiguration]) -> list[SimpleNamespace]:
        asked.extend(configurations)
        fits = [[change["value"] for change in each.changes] == [2] for each in configurations]
        return [SimpleNamespace(**ran_out, fits=fit, oom_report=lambda: report, directory="") for fit in fits]

    runs: Any = SimpleNamespace(workers=2, all=run_all)
    verdict = judge(runs, PlannedConfiguration(PlannedProgram("train.py"), "t4"))
    assert [(each.title, each.tried and each.tried.fits) for each in verdict.advice] == [
        ("4", True),
        ("0", None),
        ("1", None),
        ("2", False),
    ]
    assert [each.memory for each in asked] == [None, LARGEST_MEMORY, None, None]
    assert verdict.needed == 1300  # it fits nowhere: the report's figure, or what there was, and CUDA's context
    assert verdict.free_bytes == GPUS["t4"].total_memory - 1300


@pytest.mark.parametrize("mode", ["", "hooks"])
def test_changes_to_make_private_are_tried_at_its_call(mode: str) -> None:
    """And what fails stands last, what is too large before it."""
    kinds = ("checkpoint", "dtype", "optimizer", "lora")
    suggestions = [
        {"title": kind, "code": "", "predicted_peak_bytes": 1, "actions": [{"kind": kind}], "fits": fits}
        for kind, fits in zip(kinds, (True, True, True, None), strict=True)
    ]
    report = {"suggestions": suggestions, "mode": mode}
    given = {"kind": "environment", "name": "BATCH", "value": "8"}
    statuses = {"checkpoint": "failed", "dtype": "out_of_memory", "optimizer": "finished"}

    def run_all(configurations: Sequence[PlannedConfiguration]) -> list[SimpleNamespace]:
        assert all(each.changes[0] == given for each in configurations)
        changed = [each.changes[-1]["kind"] for each in configurations]
        about = {"requested": 1, "reserved": 1, "may_reserve": 1000, "context": 300, "error": "E", "directory": ""}
        return [
            SimpleNamespace(**about, status=status, fits=status == "finished", oom_report=lambda: report)
            for status in (statuses.get(kind, "out_of_memory") for kind in changed)
        ]

    runs: Any = SimpleNamespace(workers=2, all=run_all)
    verdict = judge(runs, PlannedConfiguration(PlannedProgram("train.py"), "t4", changes=(given,)))
    assert [(each.title, each.tried is not None, each.failure) for each in verdict.advice] == (
        [("optimizer", True, ""), ("lora", False, ""), ("dtype", True, ""), ("checkpoint", True, "E")]
        if mode
        else [(kind, False, "") for kind in kinds]
    )


@pytest.mark.parametrize(
    ("exit_code", "profile", "ran_out", "status"),
    [
        (-9, None, False, "killed"),
        (1, None, False, "failed"),
        (0, None, False, "finished"),
        (1, "failed", True, "out_of_memory"),
        (0, "finished", True, "out_of_memory"),
        (0, "killed", True, "killed"),
    ],
)
def test_how_a_run_ended(exit_code: int, profile: str | None, ran_out: bool, status: str, tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text(json.dumps({"steps": 2, "reserved": 9}))
    (tmp_path / "profile").mkdir()
    if profile is not None:
        peak = {"requested_bytes": 5, "reserved_bytes": 7, "categories": {"noise": 5}, "phase": "noise"}
        content = {"status": profile, "devices": {"cpu": {}, "cuda:0": {"peak": peak}}}
        (tmp_path / "profile/profile.json").write_text(json.dumps(content))
    if ran_out:
        request = {"category": "gradients", "module": "fc", "phase": "backward", "bytes": 30}
        report = {"request": request, "room": {"reserved_bytes": 4}}
        (tmp_path / "profile/oom_report.json").write_text(json.dumps(report))
    run = _read(tmp_path, exit_code, 1.0)
    assert (run.status, run.fits, run.reserved) == (status, status == "finished", 9)
    assert (run.category, run.wanted) == (("gradients", 34) if ran_out else ("", 0))


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"status": "failed", "error": "E"}, "failed on the virtual GPU (E): see"),
        ({"status": "killed", "error": "E"}, "was killed on the virtual GPU (E): see"),
        ({"requested": None}, "allocated nothing on the GPU"),
        ({"steps": 0}, "ended before its first training step"),
        ({"steps": 0, "status": "out_of_memory", "fits": False}, None),
        ({}, None),
    ],
)
def test_runs_that_show_nothing_about_memory(about: dict[str, Any], sentence: str | None) -> None:
    run: Any = SimpleNamespace(
        **{"status": "finished", "fits": True, "steps": 1, "requested": 9, "directory": "", **about}
    )
    with contextlib.nullcontext() if sentence is None else pytest.raises(MemprofError, match=re.escape(sentence)):
        check_run(PlannedProgram("train.py"), run)


def test_progress_lines_say_how_much_memory_the_gpu_has() -> None:
    """Else the same program is said to fit on a GPU and not to fit there."""
    out = io.StringIO()
    board = ProgressBoard(Console(file=out, width=80), "runs", open_ended=True)
    program = PlannedProgram("train.py", ("--batch-size", "32"))
    for memory, fits in ((None, True), (7 * 2**30, False)):
        run: Any = SimpleNamespace(
            fits=fits, status="finished" if fits else "out_of_memory", requested=6 * 2**30, seconds=2.0
        )
        show_run(board, PlannedConfiguration(program, "t4", memory), run)
    configuration = PlannedConfiguration(PlannedProgram("train.py"), "t4")
    for name in ("train.py:12", "env:BATCH"):
        configuration = Range(name, 1, 9).apply(configuration, 4)
    show_run(board, configuration, run)
    assert out.getvalue().splitlines() == [
        "t4 (14.76 GiB) --batch-size 32  fits, peak 6.00 GiB  2 s",
        "t4 (7.00 GiB) --batch-size 32  out of memory  2 s",
        "t4 (14.76 GiB) with train.py:12=4, BATCH=4  out of memory  2 s",
    ]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("needed", "kept"), [(9000, 9000), (9000, 20000), (14000, 300_000), (140_000, 140_001)])
def test_what_a_card_must_have_is_found_within_two_percent(needed: int, kept: int, workers: int) -> None:
    """In MiB. Where less than it has kept is left, the program gives freed memory back."""
    context = GPUS["h200"].context_memory

    def run(memory: int) -> SimpleNamespace:
        about = {"status": "finished", "steps": 2, "requested": needed * _MIB * 9 // 10 - context, "context": context}
        reserved = min(memory, kept * _MIB) - context
        return SimpleNamespace(
            **about, fits=memory >= needed * _MIB, reserved=reserved, retries=memory < kept * _MIB, directory=""
        )

    runs: Any = SimpleNamespace(workers=workers, all=lambda asked: [run(memory_of(each)) for each in asked])
    verdict = judge(runs, PlannedConfiguration(PlannedProgram("train.py"), "h200"))
    assert needed <= verdict.needed / _MIB <= needed / 0.98 + 1


def test_a_small_program_needs_its_context_and_what_it_reserves() -> None:
    """It fits in the least memory that a virtual GPU can have, which is more."""
    run: Any = SimpleNamespace(requested=2**20, reserved=2 * 2**20 - 1, context=300 * 2**20, retries=0, fits=True)
    runs: Any = SimpleNamespace(workers=2)  # none of which is needed
    configuration = PlannedConfiguration(PlannedProgram("train.py"), "h200")
    assert least_memory(runs, configuration, run) == 302 * 2**20


@pytest.mark.parametrize("status", ["failed", "killed"])
def test_a_run_that_fails_for_another_reason_is_no_proof_that_more_memory_is_needed(status: str) -> None:
    """The program needs 9000 MiB. Below 12 000 it refuses to run, as programs do that look at the card's memory."""
    context = GPUS["h200"].context_memory

    def run(memory: int) -> SimpleNamespace:
        about = {"steps": 2, "requested": 8000 * _MIB, "context": context, "directory": "", "retries": 1}
        ends = {"fits": memory >= 12_000 * _MIB, "status": "finished" if memory >= 12_000 * _MIB else status}
        return SimpleNamespace(**about, **ends, reserved=memory - context)

    tried: list[int] = []

    def run_all(asked: list[PlannedConfiguration]) -> list[SimpleNamespace]:
        tried.extend(map(memory_of, asked))
        return [run(memory_of(each)) for each in asked]

    runs: Any = SimpleNamespace(workers=1, all=run_all)
    configuration = PlannedConfiguration(PlannedProgram("train.py"), "h200", 40_000 * _MIB)
    large: Any = run(40_000 * _MIB)
    needed = least_memory(runs, configuration, large)
    assert needed == min(size for size in (*tried, 40_000 * _MIB) if size >= 12_000 * _MIB)
    assert len([size for size in tried if size < 12_000 * _MIB]) == 1


@pytest.mark.parametrize(("more", "kind"), [(0, "l4"), (1, "rtx4090")])
def test_another_kind_is_predicted_with_its_own_context(more: int, kind: str) -> None:
    """What an L4 has beyond its context: an A10 has a little less, and the context of an H200 is larger."""
    beyond = GPUS["l4"].total_memory - GPUS["l4"].context_memory + more
    configuration, run = PlannedConfiguration(PlannedProgram("train.py"), "h200"), cast(VirtualRun, None)
    assert Verdict(configuration, run, needed=GPUS["h200"].context_memory + beyond).predicted_gpu == kind
