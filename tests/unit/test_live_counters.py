# SPDX-License-Identifier: Apache-2.0
"""The live counters in the names of reports, from counters as the extension gives them."""

import os
from typing import Any

import pytest

from opacus_memprof.recording import live, native

HELD = {"activation_hooks_shared": 70, "noise": 0, "activation_hooks_opacus_only": 20, "forward_undecided": 10}
NAMED = {"activation_hooks": 90, "noise": 0, "forward_undecided": 10}


def test_what_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {"bytes": 512, "step": 1, "phase": "forward"}
    device = {"requested_bytes": 100, "peak_bytes": 150, "phase": "clip", "categories": HELD, "reserved_peak": reserved}
    unknown = {"bytes": None, "step": 0, "phase": "idle"}
    empty = {**device, "requested_bytes": 0, "categories": {"noise": 0}, "reserved_peak": unknown}
    counters = {"unix_ns": 5, "step": 3, "logical_step": 2, "devices": {"cuda:0": device, "cuda:1": empty}}
    monkeypatch.setattr(native, "counters", lambda: counters)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = live.read_live()
    assert (found.unix_ns, found.pid, found.rank, found.step, found.logical_step) == (5, os.getpid(), 3, 3, 2)
    assert found.devices["cuda:0"] == {
        "requested_bytes": 100,
        "peak_bytes": 150,
        "phase": "clip",
        "categories": NAMED,
        "activation_hooks": {"shared_with_autograd": 70, "opacus_only": 20},
        "reserved_peak": {"bytes": 512, "step": 1, "phase": "forward"},
    }
    assert found.devices["cuda:1"].reserved_peak is None
    assert live.read_breakdown() == {"cuda:0": {"activation_hooks": 90, "forward_undecided": 10}}
    monkeypatch.delenv("RANK")
    assert live.read_live().rank is None


@pytest.mark.parametrize(("counted", "expected"), [((128, 512, 100), (128, 512, 100)), ((-1, -1, -1), (None,) * 3)])
def test_peaks(counted: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = dict(zip(("allocated_bytes", "reserved_bytes", "upstream_requested_bytes"), counted, strict=True))
    place = {"unix_ns": 5, "step": 3, "phase": "backward"}
    peaks = {"cpu": {"requested_bytes": 100, **allocator, **place, "categories": HELD}}
    monkeypatch.setattr(native, "peaks", lambda: peaks)
    (peak,) = live.read_peaks().values()
    assert (peak.allocated_bytes, peak.reserved_bytes, peak.counted_bytes) == expected
    assert peak.categories == NAMED
    assert peak.activation_hooks == {"shared_with_autograd": 70, "opacus_only": 20}
    assert (peak.requested_bytes, peak.unix_ns, peak.step, peak.phase) == (100, 5, 3, "backward")
