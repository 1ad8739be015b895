# SPDX-License-Identifier: Apache-2.0
"""Types of the compiled core, which reads profiles without torch. Only opacus_memprof.profiles.core imports it."""

from collections.abc import Callable
from typing import Any

BUILTIN_CATEGORIES: list[str]  # by id; a program's own have the ids after these
BUILTIN_PHASES: list[str]

def replay(directory: str, timeline_points: int = 2000) -> dict[str, Any]: ...  # see csrc/core/replay.h
def for_event_rows(directory: str, on_rows: Callable[[bytes], object]) -> None:
    """Calls `on_rows` with all rows of the event file, in pieces of whole rows; see csrc/core/event_rows.h."""

def read_torch_snapshot(path: str) -> dict[str, Any]:
    """The arrays of csrc/core/torch_snapshot.h, as bytes, and its strings. Raises RuntimeError for any other file."""

class Follower:
    """Reads further in directory/events.bin while it is written. Raises RuntimeError if the file is not readable."""

    def __init__(self, directory: str) -> None: ...
    def advance(self) -> dict[str, Any]: ...  # live memory now; see csrc/core/follower.h
