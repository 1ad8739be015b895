# SPDX-License-Identifier: Apache-2.0
"""What the toolkit has seen in this process, for its reports: snapshots, models and differences as the functions that
take them return them, and findings."""

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


def note(kind: Kind, *seen: Any) -> None:
    """Keeps what was seen for the reports."""
    now = time.monotonic()
    _entries[kind].extend((now, one) for one in seen)


def noted(kind: Kind, since: float = 0.0) -> list[Any]:
    """What was seen since a time of time.monotonic(), oldest first."""
    return [one for when, one in list(_entries[kind]) if when >= since]


def clear() -> None:
    """Forgets everything: the memory that it takes, and what the next report would say."""
    for entries in _entries.values():
        entries.clear()
