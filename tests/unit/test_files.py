# SPDX-License-Identifier: Apache-2.0
"""Files are written whole, and truncated ones get a message."""

import os
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import read_object, replacing, write_text


def test_a_file_is_replaced_whole_and_its_directory_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "report.txt"
    assert write_text(path, "旧") == path
    write_text(path, "新\ud800")
    assert path.read_bytes() == "新".encode() + b"\\ud800"
    assert os.listdir(path.parent) == ["report.txt"]


def test_what_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as temporary:
        temporary.write_text("half\ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_place_that_is_none(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MemprofError, match=r"cannot write .*file/x.txt \(.*\): choose another place"):
        write_text(blocked / "x.txt", "")


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"{half", "Expecting"), (b"\xff", "utf-8"), (b"[]", "not a JSON object")],
)
def test_what_is_no_object_is_refused_in_a_sentence(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MemprofError, match=rf"^[^\n]*file.json cannot be read \(.*{why}.*\): try again$"):
        read_object(path, "try again")
    path.write_text('{"a": "\\ud800"}')
    assert read_object(path) == {"a": "\ud800"}
