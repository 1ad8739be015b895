# SPDX-License-Identifier: Apache-2.0
"""The table of events, as pandas and duckdb read it, against docs/format.md's reader."""

import json
import re
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from event_files import START, EventFile
from random_profile import Oracle, write_random_profile
from test_events import a_run

from opacus_memprof.analysis.events import ALLOC, GAP, ROW, Events
from opacus_memprof.analysis.profile import build_profile, load_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.reports.tables import _columns, _live_bytes, write_parquet


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_random_profile(tmp_path_factory.mktemp("profile"), 1500)
    write_parquet(view_profile(load_profile(directory), directory), directory / "events.parquet")
    return directory


def test_pandas_reads_what_the_records_say(directory: Path) -> None:
    table = pd.read_parquet(directory / "events.parquet")
    oracle = Oracle(directory, 1)
    raw, names = oracle.events, oracle.names
    kinds = ["none", "alloc", "free", "retag", "step", "phase", "snapshot", "seed", "oom"]
    assert table["event"].tolist() == list(range(len(raw["kind"])))
    assert (table["time_ns"] == raw["time"].astype(np.int64) * 4).all()
    assert table["kind"].tolist() == [kinds[id] for id in raw["kind"]]
    assert table["phase"].tolist() == [names["phases"][id] for id in raw["phase"]]
    assert table["step"].tolist() == raw["step"].tolist()
    assert table["thread"].unique().tolist() == ["main"]
    of_blocks = np.isin(raw["kind"], (1, 2, 3))
    blocks = table[of_blocks]
    for column, field in (("address", "address"), ("bytes", "size")):
        assert blocks[column].astype(np.int64).tolist() == raw[field][of_blocks].tolist()
    for column, field, kind in (
        ("tag", "category", "categories"),
        ("module", "module", "modules"),
        ("device",) * 2 + ("devices",),
    ):
        assert blocks[column].tolist() == [names[kind][id] for id in raw[field][of_blocks]]
    assert blocks["block"].notna().all()
    assert table[~of_blocks]["block"].isna().all()
    steps = table[table["kind"] == "step"]
    assert steps["number"].astype(int).tolist() == raw["size"][raw["kind"] == 4].tolist()
    assert steps[["device", "category", "module", "bytes", "live_bytes"]].isna().all(axis=None)


@pytest.mark.parametrize("device", [1, 2])
def test_live_bytes_are_the_running_sum(directory: Path, device: int) -> None:
    table = pd.read_parquet(directory / "events.parquet")
    oracle = Oracle(directory, device)
    here = table[table["device"] == f"cuda:{device - 1}"]
    assert (here["live_bytes"] == oracle.total[here["event"]]).all()
    assert (
        here["live_bytes"].max() == load_profile(directory)["devices"][f"cuda:{device - 1}"]["peak"]["requested_bytes"]
    )


def test_live_bytes_go_on_from_chunk_to_chunk() -> None:
    rows, live = np.zeros(1, ROW), np.zeros(256, np.int64)
    rows["kind"], rows["bytes"], rows["device"] = ALLOC, 5, 1
    assert [_live_bytes(rows, live).tolist() for _ in range(2)] == [[5], [10]]


def test_duckdb_adds_up_categories(directory: Path) -> None:
    oracle = Oracle(directory, 1)
    sums = duckdb.sql(f"""
        with changes as (
            select category as name, bytes from '{directory}/events.parquet'
            where device = 'cuda:0' and block is not null and kind in ('alloc', 'seed', 'retag')
            union all
            select category_before, -bytes from '{directory}/events.parquet'
            where device = 'cuda:0' and block is not null and kind in ('free', 'retag'))
        select name, sum(bytes)::bigint from changes group by name having sum(bytes) > 0""").fetchall()
    assert dict(sums) == oracle.named(oracle.live[-1])


def test_categories_are_settled_and_the_tag_is_the_record_s(tmp_path: Path) -> None:
    profile = build_profile(a_run().write(tmp_path), status="finished", exit_code=0)
    write_parquet(view_profile(profile, tmp_path), tmp_path / "a.parquet")
    table = pd.read_parquet(tmp_path / "a.parquet")
    born = table[(table["kind"] == "alloc") & (table["device"] == "cuda:0")]
    assert born[["tag", "category"]].to_numpy().tolist() == [
        ["forward_undecided", "forward_temporaries"],
        ["forward_undecided", "activations"],
        ["backward_temporaries", "gradients"],
    ]


def test_the_file_says_whose_it_is(directory: Path) -> None:
    metadata = json.loads(pq.read_schema(directory / "events.parquet").metadata[b"opacus_memprof"])
    assert (metadata["format"], metadata["status"], metadata["started_unix_ns"]) == (1, "finished", START)


def test_an_empty_profile_is_an_empty_table(tmp_path: Path) -> None:
    profile = build_profile(EventFile().write(tmp_path), status="finished", exit_code=0)
    write_parquet(view_profile(profile, tmp_path), tmp_path / "a.parquet")
    assert (len(pd.read_parquet(tmp_path / "a.parquet")), pq.read_schema(tmp_path / "a.parquet").names[0]) == (
        0,
        "event",
    )


def test_the_document_names_every_column(directory: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    table = document.partition("| column | |\n|---|---|\n")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    columns = pq.read_schema(directory / "events.parquet").names
    assert sorted(named) == sorted(columns)


def test_a_gap_has_a_number_of_events_and_no_device(tmp_path: Path) -> None:
    rows = np.zeros(1, ROW)
    rows["kind"], rows["bytes"] = GAP, 5
    columns = _columns(pa, rows, Events(EventFile().write(tmp_path)), np.zeros(256, np.int64))
    assert [column.to_pylist()[0] for column in (columns[3], *columns[-3:])] == [None, None, None, 5]
