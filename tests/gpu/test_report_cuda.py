# SPDX-License-Identifier: Apache-2.0
"""The snapshot that `report --memory-viz` writes has the blocks that torch's own snapshot has."""

import gc
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.cuda import _memory_viz

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.reports.memory_viz import write_memory_viz
from opacus_memprof.reports.perfetto import write_perfetto


def live_blocks(snapshot: dict[str, Any]) -> set[tuple[int, int]]:
    """Address and requested size of what is allocated on cuda:0."""
    found = set()
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment["device"] == 0 and block["state"] == "active_allocated":
                found.add((address, block["requested_size"]))
            address += block["size"]
    return found


def test_the_live_blocks_are_torchs(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "profile", device="cuda") as session:
        model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        session.attach(model, optimizer)
        for _ in range(3):
            model(torch.randn(64, 300, device="cuda")).square().mean().backward()
            optimizer.step()
        gc.collect()
        torch.cuda.synchronize()
        theirs = live_blocks(torch.cuda.memory._snapshot())
    profile = load_profile(tmp_path / "profile")
    write_memory_viz(view_profile(profile, tmp_path / "profile"), tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert live_blocks(snapshot) == theirs
    live = sum(_memory_viz.calc_active(segment) for segment in snapshot["segments"])
    assert live == sum(size for _, size in theirs) == profile["devices"]["cuda:0"]["end_bytes"]
    assert f"total_allocated: {_memory_viz.Bytes(live)}\n" in _memory_viz.segsum(snapshot)
    write_perfetto(view_profile(profile, tmp_path / "profile"), tmp_path / "a.pftrace")
    assert b"cuda:0 requested bytes" in (tmp_path / "a.pftrace").read_bytes()
