# SPDX-License-Identifier: Apache-2.0
"""The journal of this process for the toolkit's reports: snapshots, model analyses, differences and findings."""

import time
from collections import deque
from typing import Any, Literal

Kind = Literal["snapshot", "model", "difference", "finding"]

# The latest of each kind stay. A model's table has an entry for each of its parameters.
_entries: dict[Kind, deque[tuple[float, Any]]] = {
    "snapshot": deque(maxlen=1000),
    "model": deque(maxlen=100),
    "difference": deque(maxlen=1000),
    "finding": deque(maxlen=1000),
}


def add(kind: Kind, *entries: Any) -> None:
    """Adds entries."""
    now = time.monotonic()
    _entries[kind].extend((now, entry) for entry in entries)


def entries_since(kind: Kind, since: float = 0.0) -> list[Any]:
    """The entries since a time of time.monotonic(), oldest first."""
    return [entry for time_added, entry in list(_entries[kind]) if time_added >= since]


def clear() -> None:
    """Removes all entries."""
    for entries in _entries.values():
        entries.clear()
