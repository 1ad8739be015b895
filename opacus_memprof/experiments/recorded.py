# SPDX-License-Identifier: Apache-2.0
"""What a run has left in its profile's directory beside profile.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opacus_memprof.analysis.events import ALLOC, FREE, SEED, Events, Rows
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.files import read_object


def highest_until(directory: Path, device: str, ends: Sequence[int]) -> list[int]:
    """The highest live bytes of a device from each event of `ends` until the next: (start, ends[0]], (ends[0], ends[1]]
    … in rising order. 0 where nothing happened between. Raises MemprofError where there are no readable events."""
    id = 0 if device == "cpu" else 1 + int(device.partition(":")[2])
    highest, live = [0] * len(ends), 0

    def take(rows: Rows) -> None:
        nonlocal live
        own = rows[(rows["device"] == id) & (rows["block"] >= 0)]
        sign = np.select([np.isin(own["kind"], (ALLOC, SEED)), own["kind"] == FREE], [1, -1])
        levels = live + np.cumsum(sign * own["bytes"].astype(np.int64))
        places = np.searchsorted(ends, own["event"])
        for place in np.unique(places[places < len(ends)]).tolist():
            highest[place] = max(highest[place], int(levels[places == place].max()))
        live = int(levels[-1]) if len(levels) else live

    Events(directory).for_each_chunk(take)
    return highest


def best_suggestion(directory: Path) -> dict[str, Any] | None:
    """The first suggestion of the latest failure's report, which fits if any does: `title`, `code`,
    `predicted_peak_bytes` and `fits`. None where memory did not run out, or nothing is known that would help."""
    try:
        suggestions = read_object(directory / OOM_REPORTS[1])["suggestions"]
    except MemprofError:
        return None
    if not suggestions:
        return None
    return {key: suggestions[0][key] for key in ("title", "code", "predicted_peak_bytes", "fits")}
