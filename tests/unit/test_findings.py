# SPDX-License-Identifier: Apache-2.0
"""The share of the peak from which wasted memory is reported."""

from types import SimpleNamespace
from typing import Any

import pytest

from opacus_memprof.analysis.findings import Run
from opacus_memprof.analysis.names import Names


@pytest.mark.parametrize(("size", "material"), [(0, False), (99, False), (100, True), (10_000, True)])
def test_wasted_memory_is_reported_from_a_hundredth_of_the_peak_on(size: int, material: bool) -> None:
    devices: Any = {"cpu": SimpleNamespace(peak=SimpleNamespace(requested_bytes=10_000))}
    nameless: Any = object.__new__(Names)
    assert Run(devices, {}, [], nameless).is_material("cpu", size) is material


def test_nothing_is_material_where_nothing_was_allocated() -> None:
    devices: Any = {"cpu": SimpleNamespace(peak=SimpleNamespace(requested_bytes=0))}
    nameless: Any = object.__new__(Names)
    assert not Run(devices, {}, [], nameless).is_material("cpu", 0)
