# SPDX-License-Identifier: Apache-2.0
"""Writes the summary as one CSV table of bytes by category, for spreadsheets and data frames."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from opacus_memprof.analysis.profile_view import ProfileView
from opacus_memprof.profiles.files import replacing
from opacus_memprof.profiles.profile import Device, EventGap

COLUMNS = ("device", "table", "name", "step", "phase", "category", "bytes")


def write_csv(view: ProfileView, path: str | os.PathLike[str]) -> None:
    """Writes the bytes by category at the peak and at the peaks of phases and steps, without empty categories.

    The column `table` is `peak`, `module` or `component` (parts of the peak, by `name`), or `phase` or `step` (the peak
    of each). The rows of a phase or step, or of one of the peak's three tables, add up to the requested bytes at that
    instant.

    A row of the table `gap` has the number of missing events and the step in which the gap begins, and no bytes.

    Rows of a run on a virtual GPU have its kind in the column `virtual_gpu`.

    Raises:
        MemprofError: `path` cannot be written.
    """
    profile = view.profile
    virtual_gpu = {} if profile.virtual is UNSET else {"virtual_gpu": profile.virtual.gpu}
    with (
        replacing(path) as temporary,
        open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, *virtual_gpu))
        for name, device in profile.devices.items():
            writer.writerows((name, *row, *virtual_gpu.values()) for row in _gap_rows(profile.events.gaps))
            writer.writerows((name, *row, *virtual_gpu.values()) for row in _rows(device))


def _gap_rows(gaps: Sequence[EventGap]) -> Iterator[tuple[Any, ...]]:
    for gap in gaps:
        yield "gap", f"{gap.events} events after event {gap.first_event}", gap.step, "", "", 0


def _rows(device: Device) -> Iterator[tuple[Any, ...]]:
    peak = device.peak
    time = (peak.step, peak.phase)
    yield from _category_rows("peak", "", time, peak.categories)
    for table, groups in (("module", peak.modules), ("component", peak.components)):
        for name, categories in groups.items():
            yield from _category_rows(table, name, time, categories)
    for name, phase in device.phases.items():
        yield from _category_rows("phase", name, (phase.step, name), phase.categories)
    for step in device.steps:
        yield from _category_rows("step", str(step.step), (step.step, step.phase), step.categories)


def _category_rows(
    table: str, name: str, time: tuple[Any, Any], categories: Mapping[str, int]
) -> Iterator[tuple[Any, ...]]:
    for category, size in categories.items():
        if size:
            yield table, name, *time, category, size
