# SPDX-License-Identifier: Apache-2.0
"""The compiled readers on damaged event files: they answer, or raise RuntimeError, and never crash or run on."""

import os
import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from opacus_memprof.profiles.core import Follower, for_event_rows, replay

DATA = Path(__file__).parents[1] / "data"
PROFILES = ["format_1_hooks", "format_1_ghost", "format_1_oom"]
RECORD_BYTES, HEADER_BYTES = 32, 4096
SECONDS = 2.0  # for each reader and profile


def follow(directory: str) -> None:
    follower = Follower(directory)
    follower.advance()
    follower.advance()


def rows(directory: str) -> None:
    for_event_rows(directory, lambda _: None)


def damage(content: bytes, draw: random.Random) -> bytes:
    """Overwrites bytes and numbers, mostly of the header, repeats or exchanges records, and cuts the end off."""
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(256 if draw.random() < 0.3 and len(damaged) > 256 else len(damaged))
        match draw.randrange(4):
            case 0:
                damaged[place] = draw.randrange(256)
            case 1:
                number = draw.choice([0, 1, 2**31, 2**35, 2**48 - 1, 2**63, 2**64 - 1])
                start = place // 8 * 8
                damaged[start : start + 8] = struct.pack("<Q", number)
            case 2:
                records = max((len(damaged) - HEADER_BYTES) // RECORD_BYTES, 1)
                source, target = (HEADER_BYTES + draw.randrange(records) * RECORD_BYTES for _ in range(2))
                damaged[target : target + RECORD_BYTES] = damaged[source : source + RECORD_BYTES]
            case _:
                if draw.random() < 0.2:
                    del damaged[draw.randrange(len(damaged)) :]
                    if not damaged:
                        return b""
    return bytes(damaged)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("read", [replay, rows, follow])
def test_damaged_event_files(read: Callable[[str], object], profile: str, tmp_path: Path) -> None:
    content = (DATA / profile / "events.bin").read_bytes()
    draw = random.Random(f"{profile} {read.__name__}")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        (tmp_path / "events.bin").write_bytes(damage(content, draw))
        with suppress(RuntimeError):
            read(str(tmp_path))


@pytest.mark.parametrize("read", [replay, rows, follow])
def test_a_piece_that_claims_more_live_blocks_than_memory_holds(read: Callable[[str], object], tmp_path: Path) -> None:
    content = bytearray((DATA / "format_1_hooks" / "events.bin").read_bytes())
    content[8:12] = struct.pack("<I", 2)  # the version that has pieces
    (tmp_path / "events.bin").write_bytes(content)
    piece, first_event, blocks = 1, 2**20, 2**35
    content[88:112] = struct.pack("<3Q", piece, first_event, blocks)
    later = tmp_path / "events.1.bin"
    later.write_bytes(content[:HEADER_BYTES])
    os.truncate(later, HEADER_BYTES + blocks * RECORD_BYTES)  # takes no disk space
    read(str(tmp_path))


@pytest.mark.parametrize("read", [replay, rows, follow])
def test_a_fifo_is_refused_and_not_waited_for(read: Callable[[str], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.bin")
    with pytest.raises(RuntimeError, match="is not a regular file"):
        read(str(tmp_path))
