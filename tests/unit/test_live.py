# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof top` on event files written by hand."""

import json
import subprocess
from pathlib import Path

import pytest
from event_files import EventFile
from typer.testing import CliRunner

from opacus_memprof.analysis.live import directory_of_process
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError


def growing(tmp_path: Path, grows: int) -> Path:
    file = EventFile()
    for step in range(8):
        file.add("alloc", 4096 + 512 * step, 1000 + grows * step, module="head", step=step)
        file.add("free", 4096 + 512 * (step - 1), 0, step=step) if step else None
        file.add("step", size=step + 1, step=step + 1)
    return file.write(tmp_path)


@pytest.mark.parametrize("grows", [0, 64])
def test_the_trend_is_the_slope_of_what_steps_leave(tmp_path: Path, grows: int) -> None:
    answer = CliRunner().invoke(app, ["top", str(growing(tmp_path, grows)), "--once", "--json"])
    device = json.loads(answer.stdout)["devices"]["cuda:0"]
    assert device["step_ends"] == [1000 + grows * step for step in range(8)]
    assert device["bytes_per_step"] == grows
    assert device["modules"] == {"head": {"unattributed": 1000 + 7 * grows}}
    assert device["peak_bytes"] == 2000 + 13 * grows  # the newest two, before the older one is freed
    shown = CliRunner().invoke(app, ["top", str(tmp_path), "--once"]).stdout
    assert ("+64 B a step" if grows else "steady") in shown


def test_a_directory_whose_name_is_a_number_is_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("999999999").mkdir()
    growing(Path("999999999"), 0)
    assert CliRunner().invoke(app, ["top", "999999999", "--once"]).exit_code == 0


def test_what_cannot_be_followed_is_said(tmp_path: Path) -> None:
    cases = {
        (str(tmp_path / "nowhere"),): "nowhere is not there: give the directory of a profile",
        ("999999999",): "there is no process 999999999",
        (str(growing(tmp_path, 0)), "--interval", "0"): "--interval is 0: give a number above 0",
    }
    for arguments, sentence in cases.items():
        answer = CliRunner().invoke(app, ["top", *arguments])
        assert isinstance(answer.exception, MemprofError)
        assert sentence in str(answer.exception)


def test_a_process_that_is_not_profiled_is_refused() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(MemprofError, match="is not being profiled"):
                directory_of_process(process.pid)
        finally:
            process.kill()
