# SPDX-License-Identifier: Apache-2.0
"""What is read of a run's profile beside profile.json."""

import json
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.result import best_suggestion, peaks_between
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
