# SPDX-License-Identifier: Apache-2.0
"""Reads the events and the failure report of a run's profile directory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from opacus_memprof.analysis.events import ALLOC, FREE, SEED, Events, Rows
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.experiment_result import BestSuggestion
from opacus_memprof.profiles.files import read_object


def peaks_between(directory: Path, device: str, ends: Sequence[int]) -> list[int]:
    """Returns the highest live bytes of a device in each interval of events.

    The intervals are (start, ends[0]], (ends[0], ends[1]] and so on. An interval without events of the device has 0.

    Args:
        directory: the directory of the profile.
        device: the device, such as "cuda:0".
        ends: numbers of events, ascending.

    Raises:
        MemprofError: the events cannot be read.
    """
    id = 0 if device == "cpu" else 1 + int(device.partition(":")[2])
    highest, live = [0] * len(ends), 0

    def update(rows: Rows) -> None:
        nonlocal live
        of_device = rows[(rows["device"] == id) & (rows["block"] >= 0)]
        sign = np.select([np.isin(of_device["kind"], (ALLOC, SEED)), of_device["kind"] == FREE], [1, -1])
        levels = live + np.cumsum(sign * of_device["bytes"].astype(np.int64))
        intervals = np.searchsorted(ends, of_device["event"])
        for interval in np.unique(intervals[intervals < len(ends)]).tolist():
            highest[interval] = max(highest[interval], int(levels[intervals == interval].max()))
        live = int(levels[-1]) if len(levels) else live

    Events(directory).for_each_chunk(update)
    return highest


def best_suggestion(directory: Path) -> BestSuggestion | None:
    """Returns the first suggestion of the latest failure's report, which fits if any does; None if there is none."""
    try:
        suggestions = read_object(directory / OOM_REPORTS[1])["suggestions"]
    except MemprofError:
        return None
    if not suggestions:
        return None
    return BestSuggestion(**{key: suggestions[0][key] for key in BestSuggestion.__struct_fields__})
