# SPDX-License-Identifier: Apache-2.0
"""Experiments on a GPU: peaks and times as torch itself has them, and memory that runs out half way."""

from pathlib import Path
from typing import Any

import pytest
import torch

from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Configuration
from tests.on_virtual_gpu import interpreter

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _same_gpu_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments run in processes of their own, which see a virtual GPU only if they are given one."""
    monkeypatch.setattr(process, "_launcher_arguments", lambda nproc: interpreter()[1:])


SMALL = Configuration(seq_length=256, batch_size=8, hidden_dim=256, num_heads=4, num_steps=3, warmup_steps=2)


@pytest.mark.parametrize(
    "mode", ["ghost", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("vanilla", "flash_clip"))]
)
def test_peak_and_time_of_a_run(mode: Any, tmp_path: Path) -> None:
    chosen = Configuration(**{**SMALL.to_json(), "mode": mode, "device": "cuda"})
    result = process.run(chosen, tmp_path, gpu=0)
    assert (result["status"], result["error"], result["device"]) == ("finished", None, "cuda:0")
    assert result["environment"]["device_name"] == torch.cuda.get_device_name(0)
    peak = result["peak"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"]
    assert peak["requested_bytes"] + peak["rounding"] == peak["allocated_bytes"]
    # The highest requested and the highest allocated bytes may be two instants, a few roundings apart.
    highest = result["allocator_peak"]["max_allocated_bytes"]
    assert 0 <= highest - peak["allocated_bytes"] <= 0.01 * highest
    assert result["breakdown"]["total_allocated_mb"] * 2**20 == peak["allocated_bytes"]
    assert len(result["step_times_ms"]) == 3
    assert all(0 < time < 10_000 for time in result["step_times_ms"])
    assert all(snapshot["remainder"] == 0 for snapshot in result["snapshots"])


def test_memory_that_runs_out_in_forward(tmp_path: Path) -> None:
    """Of the logits: 8 x 4096 x 4 000 000 x 4 bytes, more than any GPU has."""
    chosen = Configuration(
        **{**SMALL.to_json(), "seq_length": 4096, "vocab_size": 4_000_000, "hidden_dim": 64, "device": "cuda"}
    )
    result = process.run(chosen, tmp_path)
    assert result["status"] == "out_of_memory"
    assert result["progress"]["stage"] == "training"
    failed = result["out_of_memory"][-1]
    assert failed["requested_bytes"] == 8 * 4096 * 4_000_000 * 4
    assert failed["module"] == "head"
    assert failed["categories"]["model_parameters"] > 2 * 4_000_000 * 64 * 4
    assert sum(failed["categories"].values()) == failed["live_bytes"]
