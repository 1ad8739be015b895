# SPDX-License-Identifier: Apache-2.0
"""Files that grow by lines, and words that reach the program's logging or the console."""

import io
import logging
import sys
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.toolkit import output


def test_two_files_of_one_second_have_two_names(tmp_path: Path) -> None:
    paths = [output.claim(tmp_path, "log", ".txt") for _ in range(5)]
    assert len(set(paths)) == 5
    assert all(path.exists() for path in paths)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MemprofError, match=r"cannot write .*: choose another place"):
        output.claim(blocked, "x", ".log")


def test_a_line_is_one_line(tmp_path: Path) -> None:
    output.append_line(tmp_path / "log", "one\ntwo")
    output.append_line(tmp_path / "log", "three")
    assert (tmp_path / "log").read_text() == "one two\nthree\n"


def test_an_ascii_terminal_shows_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    output.echo("模型 ok")
    assert terminal.buffer.getvalue() == b"?? ok\n"  # type: ignore[attr-defined]


def test_the_programs_logging_decides_where_it_is_set_up(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        output.say("hello")
    assert [(record.name, record.message) for record in caplog.records] == [("opacus_memprof.toolkit", "hello")]
    assert capsys.readouterr().out == ""


def test_it_is_printed_where_it_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    output.say("hello")
    output.say("detail", logging.DEBUG)
    output.say("trouble", logging.WARNING)
    assert capsys.readouterr().out == "[INFO] hello\n[WARNING] trouble\n"
