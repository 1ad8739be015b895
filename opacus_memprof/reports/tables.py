# SPDX-License-Identifier: Apache-2.0
"""Writes a profile as tables: its summary as CSV or LaTeX, and every event as Parquet."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from opacus_memprof.analysis.events import ALLOC, FREE, GAP, KINDS, SEED, SNAPSHOT, STEP, Events, Rows, encode_names
from opacus_memprof.analysis.profile_view import DeviceView, Part, ProfileView
from opacus_memprof.errors import require
from opacus_memprof.profiles.files import replacing, write_text
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.profile import Device, EventGap

COLUMNS = ("device", "table", "name", "step", "phase", "category", "bytes")
_ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_TRANSLATION = str.maketrans(_ESCAPED)


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


def escape_latex(text: str) -> str:
    """Escapes text for a paragraph of LaTeX."""
    return " ".join(text.split()).translate(_TRANSLATION)


def latex_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a `table` environment, with text in the first column and all cells escaped."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"\toprule",
        _latex_line(header),
        r"\midrule",
        *map(_latex_line, rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def write_latex(view: ProfileView, path: str | os.PathLike[str]) -> None:
    """Writes three tables for each device: the peak by category, by module, and the peak of each phase.

    Raises:
        MemprofError: `path` cannot be written.
    """
    tables = [text for device in view.devices.values() for text in _latex_tables(device)]
    head = "% \\usepackage{booktabs} goes into the preamble.\n"
    write_text(path, "\n".join([head, *tables]))


def _latex_tables(view: DeviceView) -> list[str]:
    total = ("total", view.peak_size, "100.0%" if view.device.peak.requested_bytes else "")
    tables = [
        latex_table(
            f"Requested memory at the peak of {view.title}, {view.peak_size} in {view.peak_moment}, by category",
            ("Category", "Memory", "Share"),
            [*map(_latex_row, view.categories), total],
        )
    ]
    if view.modules:
        tables.append(
            latex_table(
                f"The same by module: {view.title}", ("Module", "Memory", "Share"), map(_latex_row, view.modules)
            )
        )
    phases = [(row.name, row.size, str(row.step)) for row in view.phases]
    tables.append(
        latex_table(f"Requested memory of {view.title} at the peak of each phase", ("Phase", "Memory", "Step"), phases)
    )
    return tables


def _latex_row(part: Part) -> tuple[str, str, str]:
    return part.name or "(no module)", part.size, part.share.replace(" ", "")


def write_parquet(view: ProfileView, path: str | os.PathLike[str]) -> None:
    """Writes one row for each event, and replaces `path` atomically; docs/reports.md names the columns.

    Raises:
        MemprofError: pyarrow is not installed, events.bin is not readable, or `path` cannot be written.
    """
    pa = require("pyarrow", "Parquet tables")
    parquet = require("pyarrow.parquet", "Parquet tables")
    keys = ("format", "versions", "status", "started_unix_ns", "virtual")
    metadata = {key: view.profile[key] for key in keys if key in view.profile}
    events = view.events()
    live = np.zeros(256, np.int64)
    with replacing(path) as temporary:
        schema = _schema(pa).with_metadata({"opacus_memprof": to_json(metadata)})
        with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:

            def write_rows(rows: Rows) -> None:
                writer.write_table(pa.Table.from_arrays(_columns(pa, rows, events, live), schema=schema))

            events.for_each_chunk(write_rows)


def _schema(pa: Any) -> Any:
    name = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [("event", pa.int64()), ("time_ns", pa.int64()), ("kind", name), ("device", name)]
        + [(column, name) for column in ("category", "category_before", "tag", "module", "op", "phase")]
        + [("step", pa.int64()), ("stream", name), ("thread", name), ("block", pa.int64()), ("address", pa.int64())]
        + [("bytes", pa.int64()), ("live_bytes", pa.int64()), ("number", pa.int64())]
    )


def _columns(pa: Any, rows: Rows, events: Events, live: npt.NDArray[np.int64]) -> list[Any]:
    """Returns the table's columns. `live` has the bytes of each device before the rows and, on return, after them."""
    names = events.names
    kind = rows["kind"]
    numbered = np.isin(kind, (STEP, SNAPSHOT, GAP))
    deviceless = (kind == 0) | (kind == GAP) | ((kind >= STEP) & (kind <= SNAPSHOT))  # events that belong to no device

    def named(ids: npt.NDArray[Any], name: Callable[[int], str], absent: npt.NDArray[np.bool_] | None = None) -> Any:
        indices, used_names = encode_names(ids, name)
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=absent), pa.array(used_names, pa.string()))

    def number(values: npt.NDArray[Any], absent: npt.NDArray[np.bool_] | None = None) -> Any:
        return pa.array(values.astype(np.int64), mask=absent)

    return [
        number(rows["event"]),
        number(rows["time_ns"]),
        named(kind, _kind),
        named(rows["device"], names.device, deviceless),
        named(rows["category"], names.reported_category, deviceless),
        named(rows["before"], names.reported_category, deviceless),
        named(rows["tag"], names.category, deviceless),
        named(rows["module"], names.module, deviceless),
        named(rows["op"], names.op),
        named(rows["phase"], names.phase),
        number(rows["step"]),
        named(rows["stream"], names.stream),
        named(rows["thread"], names.thread),
        number(rows["block"], rows["block"] < 0),
        number(rows["address"], deviceless),
        number(rows["bytes"], deviceless),
        number(_live_bytes(rows, live), deviceless),
        number(rows["bytes"], ~numbered),
    ]


def _live_bytes(rows: Rows, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the live bytes of each row's device, after the row."""
    born, died = np.isin(rows["kind"], (ALLOC, SEED)), rows["kind"] == FREE
    change = np.where(born, 1, np.where(died, -1, 0)) * rows["bytes"].astype(np.int64) * (rows["block"] >= 0)
    result = np.zeros(len(rows), np.int64)
    for device in np.unique(rows["device"]):
        of_device = rows["device"] == device
        result[of_device] = live[device] + np.cumsum(change[of_device])
        live[device] = result[of_device][-1]
    return result


def _kind(id: int) -> str:
    return KINDS[id] if id < len(KINDS) else f"kind {id}"
