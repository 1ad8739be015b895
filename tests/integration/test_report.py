# SPDX-License-Identifier: Apache-2.0
"""The exports of a real private training say what its profile says, and what numpy makes of its events."""

import gc
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import pandas as pd
import pytest
import torch
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
from torch import nn
from torch.cuda import _memory_viz
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.cli import app


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "profile"
    gc.collect()
    with opacus_memprof.profile(directory, device="cpu") as session:
        model: Any = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
        optimizer: Any = torch.optim.Adam(model.parameters())
        model, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(torch.randn(32, 40)), batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        session.attach(model, optimizer)
        for _ in range(2):
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        del model, optimizer, loader, x
        gc.collect()
    arguments = ["--parquet", "--memory-viz", "--perfetto"]
    result = CliRunner().invoke(app, ["report", str(directory), *arguments])
    assert result.exit_code == 0, result.exception
    return directory


@pytest.fixture(scope="module")
def running_sum(directory: Path) -> np.ndarray:
    """Live bytes after each event, from the document's reader alone."""
    code = (Path(__file__).parents[2] / "docs" / "format.md").read_text().split("```python\n")[1].split("```")[0]
    reader: dict[str, Any] = {}
    exec(code, reader)
    events, _ = reader["read_events"](directory)
    sign = np.select([np.isin(events["kind"], [1, 7]), events["kind"] == 2], [1, -1])
    return np.cumsum(sign * events["size"].astype(int) * (events["device"] == 0))


def at_peak(profile: dict[str, Any]) -> dict[str, int]:
    categories = profile["devices"]["cpu"]["peak"]["categories"]
    return {category: size for category, size in categories.items() if size}


def test_parquet(directory: Path, running_sum: np.ndarray) -> None:
    profile, table = load_profile(directory), pd.read_parquet(directory / "memprof.parquet")
    blocks = table[table["block"].notna()]
    assert (blocks["live_bytes"] == running_sum[blocks["event"]]).all()
    # Categories as they stand when the next block comes or goes.
    moves = blocks[blocks["kind"] != "retag"]["event"]
    until = moves[moves > profile["devices"]["cpu"]["peak"]["event"]].min()
    before = blocks[blocks["event"] < until]
    live = Counter[str]()
    for kind, category, last, size in before[["kind", "category", "category_before", "bytes"]].itertuples(index=False):
        if kind != "free":
            live[category] += int(size)
        if kind in ("free", "retag"):
            live[last] -= int(size)
    assert {category: size for category, size in live.items() if size} == at_peak(profile)


def test_memory_viz(directory: Path, running_sum: np.ndarray) -> None:
    profile = load_profile(directory)
    snapshot = pickle.loads((directory / "memprof.pickle").read_bytes())
    live: dict[int, tuple[str, int]] = {}
    totals: list[int] = []
    by_category: list[Counter[str]] = []
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["category"], entry["size"]
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
        totals.append(sum(size for _, size in live.values()))
        by_category.append(Counter())
        for category, size in live.values():
            by_category[-1][category] += size
    assert max(totals) == running_sum.max() == profile["devices"]["cpu"]["peak"]["requested_bytes"]
    assert at_peak(profile) in [sizes for sizes, total in zip(by_category, totals, strict=True) if total == max(totals)]
    assert sum(map(_memory_viz.calc_active, snapshot["segments"])) == running_sum[-1]
    assert f"total_allocated: {_memory_viz.Bytes(int(running_sum[-1]))}\n" in _memory_viz.segsum(snapshot)


def test_perfetto(directory: Path, running_sum: np.ndarray) -> None:
    trace = proto.Trace.FromString((directory / "memprof.pftrace").read_bytes())
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in trace.packet}
    values: dict[str, list[int]] = {}
    slices = Counter[str]()
    for packet in trace.packet:
        event = packet.track_event
        if event.type == proto.TrackEvent.TYPE_COUNTER:
            values.setdefault(tracks[event.track_uuid], []).append(event.counter_value)
        elif event.type == proto.TrackEvent.TYPE_SLICE_BEGIN:
            slices[event.name] += 1
    assert max(values["total"]) == running_sum.max()
    assert set(values["total"]) <= set(running_sum.tolist())
    assert at_peak(load_profile(directory)).keys() <= values.keys()
    assert [slices[f"step {number}"] for number in range(5)] == [1, 1, 1, 1, 0]
    assert slices["forward"] == slices["backward"] == 4
