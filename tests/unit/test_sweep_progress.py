# SPDX-License-Identifier: Apache-2.0
"""The estimate of the time left, and what is said of a cell."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from opacus_memprof.experiments.engine import show_row
from opacus_memprof.experiments.result import ProgressLog
from opacus_memprof.experiments.summary import describe_outcome
from opacus_memprof.jobs.progress import ProgressBoard, time_left
from tests.unit.sweep_results import BASE, a_row, failed, finished, out_of_memory


def test_the_others_take_as_long_as_those_before() -> None:
    assert time_left(elapsed=5, elapsed_at_last=0, ended=0, total=4) is None
    assert time_left(elapsed=30, elapsed_at_last=30, ended=3, total=12) == pytest.approx(90)
    assert time_left(elapsed=34, elapsed_at_last=30, ended=3, total=12) == pytest.approx(86)
    assert time_left(elapsed=500, elapsed_at_last=30, ended=3, total=12) == 0
    assert time_left(elapsed=31, elapsed_at_last=30, ended=12, total=12) == 0


def test_runs_that_are_added_later_count() -> None:
    text = io.StringIO()
    now = 0.0
    with ProgressBoard(Console(file=text, width=200, get_time=lambda: now), "runs") as board:
        board.add(2)
        now = 60.5
        board.advance()
        assert board.position == "1 of 2, about 0:01:01 left"
        board.add(1)
        assert board.position == "1 of 3, about 0:02:01 left"
    assert "1/3 runs," in text.getvalue()


def test_no_time_left_is_claimed_when_it_is_unknown() -> None:
    text = io.StringIO()
    now = 0.0
    with ProgressBoard(Console(file=text, width=200, get_time=lambda: now), "runs", 2) as board:
        now = 60.0
        board.advance()
        now = 121.0
        assert board.position == "1 of 2, time left: longer than estimated"
        board.advance()
        assert board.position == "2 of 2"
    assert text.getvalue().rstrip().endswith(" 2/2 runs, 0:02:01")


def test_a_step_of_seconds_is_not_said_in_milliseconds() -> None:
    assert "2.58 s a step" in describe_outcome(a_row("one", "", finished(BASE) | {"avg_time_ms": 2581.7}))


def test_what_is_said_of_a_cell() -> None:
    text = io.StringIO()
    now = 0.0
    with ProgressBoard(Console(file=text, width=200, get_time=lambda: now), "configurations, 2 at once", 3) as board:
        now = 4.0
        show_row(board, a_row("one", "", finished(BASE)))
        show_row(board, a_row("two", "", out_of_memory(BASE)))
        show_row(board, a_row("three", "", failed(BASE)))
    lines = text.getvalue().splitlines()
    line = "one  finished, peak 1152.00 MB in backward, 12.5 ms a step"  # 1 GiB, 128 MiB, 300 B
    assert lines[0] == f"{line}  [1 of 3, about 0:00:08 left]"
    line = "two  out of memory, peak 1152.00 MB in backward, 3072.00 MB more for per_sample_gradients did not fit"
    assert lines[1].startswith(f"{line}  [2 of 3, ")
    assert lines[2].startswith("three  failed: ValueError while loading the model: no  [3 of 3]")
    assert "3/3 configurations, 2 at once," in lines[-1]


def test_brackets_of_an_error_are_no_markup() -> None:
    text = io.StringIO()
    with ProgressBoard(Console(file=text, width=200), "configurations", 1) as board:
        show_row(board, a_row("one", "", failed(BASE) | {"error": "IndexError: [/] a[0]"}))
    assert text.getvalue().startswith("one  failed: IndexError: [/] a[0]")


def test_a_step_on_a_virtual_gpu_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    real = replace(BASE, device="auto", num_steps=2, warmup_steps=0)
    progress = ProgressLog()
    progress.step_ended(0.0041, real)
    progress.step_ended(0.0041, replace(real, virtual_gpu="h100"))
    assert capsys.readouterr().out.splitlines() == ["> 1 of 2 steps, the last in 4.1 ms", "> 2 of 2 steps"]


def test_a_search_claims_no_time_left() -> None:
    """After the only run that is known so far, more follow."""
    out = io.StringIO()
    board = ProgressBoard(Console(file=out, width=100, force_terminal=True), "runs", open_ended=True)
    with board:
        board.add(1)
        board.advance()
    assert "runs ended: 1; results decide what is run next" in out.getvalue()
    assert "left" not in out.getvalue()
