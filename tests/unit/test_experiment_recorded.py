# SPDX-License-Identifier: Apache-2.0
"""What is read of a run's profile beside profile.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.result import best_suggestion, find_phase_edges, peaks_between
from opacus_memprof.session import profile
from tests.unit.event_files import EventFile


def test_the_highest_bytes_of_each_stretch(tmp_path: Path) -> None:
    """By hand, of two devices: 300, then 300 + 500 - 500, then nothing, then 300 - 300 + 20."""
    events = EventFile()
    for kind, address, size, device in [
        ("alloc", 1, 300, 1),
        ("alloc", 7, 10_000, 0),
        ("alloc", 2, 500, 1),
        ("free", 2, 500, 1),
        ("free", 7, 10_000, 0),
        ("free", 1, 300, 1),
        ("alloc", 3, 20, 1),
        ("alloc", 4, 9000, 1),
    ]:
        events.add(kind, address, size, device=device)
    events.write(tmp_path)
    assert peaks_between(tmp_path, "cuda:0", [1, 3, 4, 6]) == [300, 800, 0, 20]
    assert peaks_between(tmp_path, "cpu", [0, 1]) == [0, 10_000]
    with pytest.raises(MemprofError):
        peaks_between(tmp_path / "none", "cpu", [1])


def test_the_best_suggestion(tmp_path: Path) -> None:
    assert best_suggestion(tmp_path) is None
    suggestion = {"title": "smaller", "code": "x = 1", "predicted_peak_bytes": 5, "fits": True}
    report = {"suggestions": [suggestion | {"saved_bytes": 3}, {"title": "other"}]}
    (tmp_path / "oom_report.json").write_text(json.dumps(report))
    assert best_suggestion(tmp_path) == suggestion
    (tmp_path / "oom_report.json").write_text('{"suggestions": []}')
    assert best_suggestion(tmp_path) is None


@pytest.mark.parametrize(
    ("actions", "code"),
    [
        ([{"kind": "grad_sample_mode", "value": "flash_clip"}], "--mode flash_clip"),
        ([{"kind": "checkpoint", "modules": ["h.0"]}], "--checkpointing"),
        (
            [{"kind": "grad_sample_mode", "value": "ghost"}, {"kind": "dtype", "value": "bfloat16"}],
            "--mode ghost --dtype bf16",
        ),
        ([{"kind": "dtype", "value": "bfloat16"}, {"kind": "optimizer", "value": "SGD"}], "x = 1"),  # has no option
    ],
)
def test_a_suggestion_is_given_as_options_of_the_command(
    actions: list[dict[str, Any]], code: str, tmp_path: Path
) -> None:
    suggestion = {"title": "", "code": "x = 1", "predicted_peak_bytes": 5, "fits": True, "actions": actions}
    (tmp_path / "oom_report.json").write_text(json.dumps({"suggestions": [suggestion]}))
    best = best_suggestion(tmp_path)
    assert best is not None
    assert best.code == code


def test_phases_begin_where_the_program_s_do(tmp_path: Path) -> None:
    """A training of two steps on the CPU, whose phases are known; what is idle within a phase belongs to it."""
    with profile(tmp_path, device="cpu") as session:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        optimizer = torch.optim.Adam(model.parameters())
        session.attach(model)
        session.attach(optimizer)
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    edges = find_phase_edges(tmp_path)
    assert edges.event == sorted(edges.event)
    assert edges.time_ns == sorted(edges.time_ns)
    found = [(step, phase) for step, phase in zip(edges.step, edges.phase, strict=True) if phase != "idle"]
    first = [(0, "forward"), (0, "backward"), (0, "optimizer_step")]
    second = [(1, "zero_grad"), (1, "forward"), (1, "backward"), (1, "optimizer_step")]
    assert found == [*first, *second, (2, "zero_grad")]


def test_without_events_there_are_no_edges(tmp_path: Path) -> None:
    assert find_phase_edges(tmp_path / "none").event == []
