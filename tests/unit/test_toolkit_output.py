# SPDX-License-Identifier: Apache-2.0
"""Files that grow by lines, and words that reach the console whatever the root logger is set to."""

import io
import logging
import threading
import time
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.toolkit import output


def test_two_files_of_one_second_have_two_names(tmp_path: Path) -> None:
    paths = [output.create_file(tmp_path, "log", ".txt") for _ in range(5)]
    assert len(set(paths)) == 5
    assert all(path.exists() for path in paths)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MemprofError, match=r"cannot write .*: choose another place"):
        output.create_file(blocked, "x", ".log")


def test_threads_share_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(directory: Path, prefix: str, suffix: str) -> Path:
        time.sleep(0.05)  # so that the other threads come in between
        return claim(directory, prefix, suffix)

    claim = output.create_file
    monkeypatch.setattr(output, "create_file", slowly)
    file = output.LineFile(tmp_path, "history", ".jsonl")
    threads = [threading.Thread(target=file.append, args=(f"line {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [written] = tmp_path.iterdir()
    assert written == file.path
    assert sorted(written.read_text().splitlines()) == [f"line {number}" for number in range(8)]


def test_a_record_is_one_line_on_console_and_in_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = output.LineFile(tmp_path, "run", ".log")
    logger = output.make_logger("Name_1", file)
    logger.info("one\ntwo")
    logger.warning("three")
    assert file.path is not None
    lines = file.path.read_text().splitlines()
    assert capsys.readouterr().out.splitlines() == lines
    assert [line.split(" - ", 1)[1] for line in lines] == ["Name_1 - INFO - one two", "Name_1 - WARNING - three"]


def test_a_log_that_cannot_be_written_ends_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    logger = output.make_logger("run", output.LineFile(tmp_path / "file", "run", ".log"))
    logger.info("first")
    logger.info("second")
    printed = capsys.readouterr().out
    assert printed.count("the log ends: cannot write") == 1
    assert "INFO - second" in printed


def test_the_root_logger_neither_silences_nor_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [root])
    for level in (logging.WARNING, logging.DEBUG):  # Opacus leaves it at the first
        monkeypatch.setattr(logging.getLogger(), "level", level)
        output.LOGGER.info("hello\nthere")
        output.LOGGER.debug("detail")
        output.LOGGER.warning("trouble")
        assert capsys.readouterr().out == "[INFO] hello there\n[WARNING] trouble\n"
    assert root.stream.getvalue() == ""
