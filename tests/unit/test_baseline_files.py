# SPDX-License-Identifier: Apache-2.0
"""Files of baselines: what an update keeps, what has grown, and where they cannot be written."""

from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Baseline, BaselineKey
from opacus_memprof.pytest_plugin import baseline


def measured_on(device: str, peak: int) -> Baseline:
    return Baseline(BaselineKey(device, "2.15.0", "1.6.0", "none"), peak, {}, step=0, phase="idle")


def test_an_update_replaces_the_entry_of_its_device(tmp_path: Path) -> None:
    file = tmp_path / "memprof.json"
    for device, peak in (("cpu", 1), ("NVIDIA H200", 2), ("cpu", 3)):
        baseline.update(file, measured_on(device, peak))
    assert {(entry.key.device, entry.peak_bytes) for entry in baseline.read(file)} == {("cpu", 3), ("NVIDIA H200", 2)}


@pytest.mark.parametrize(("peak", "grew"), [(100, False), (101, False), (102, True), (99, False)])
def test_what_reaches_the_tolerance_has_grown(peak: int, grew: bool, tmp_path: Path) -> None:
    said = baseline.compare([measured_on("cpu", 100)], measured_on("cpu", peak), 0.02, tmp_path)
    assert (said is not None) == grew


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    measured = measured_on("cpu", 1)
    with pytest.raises(MemprofError, match=r"cannot write .*taken.memprof\.json \(.+\): choose another place"):
        baseline.update(tmp_path / "taken" / "memprof.json", measured)
    assert (tmp_path / "taken").read_text() == "a file"
