# SPDX-License-Identifier: Apache-2.0
"""Writes every event of a profile as a Parquet table, for pandas, polars and duckdb."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from opacus_memprof.analysis.events import ALLOC, FREE, GAP, KINDS, SEED, SNAPSHOT, STEP, Events, Rows, encode_names
from opacus_memprof.analysis.profile_view import ProfileView
from opacus_memprof.profiles.files import replacing
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.optional import require


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
