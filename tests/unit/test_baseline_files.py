# SPDX-License-Identifier: Apache-2.0
"""Files of baselines: what an update keeps, what has grown, and where they cannot be written."""

import fcntl
import os
import re
from pathlib import Path

import pytest
import torch
from msgspec import structs

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Baseline, BaselineKey
from opacus_memprof.pytest_plugin import baseline
from tests.unit.made_profiles import a_device, a_peak


def measured_on(device: str, peak: int) -> Baseline:
    return Baseline(BaselineKey(device, "2.15.0", "1.6.0", "none"), peak, {}, step=0, phase="idle")


def test_an_update_replaces_the_entry_of_its_device(tmp_path: Path) -> None:
    file = tmp_path / "memprof.json"
    for device, peak in (("cpu", 1), ("NVIDIA H200", 2), ("cpu", 3)):
        baseline.update(file, measured_on(device, peak))
    assert {(entry.key.device, entry.peak_bytes) for entry in baseline.read(file)} == {("cpu", 3), ("NVIDIA H200", 2)}


def test_the_device_with_the_highest_peak_is_measured() -> None:
    devices = {f"cuda:{n}": a_device(peak=a_peak(requested_bytes=size)) for n, size in enumerate((1, 3, 2))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda name: f"GPU of {name}")
        patch.setattr(torch, "__version__", "2.15.0+cu132")
        measured = baseline.measure(devices, {"hooks", "ghost", "flash_clip"})
    assert (measured.key.device, measured.key.torch, measured.peak_bytes) == ("GPU of cuda:1", "2.15.0", 3)
    assert measured.key.mode == "flash_clip+ghost+hooks"


def test_of_many_modules_those_that_grew_most_are_named(tmp_path: Path) -> None:
    def measured(*sizes: int) -> Baseline:
        modules = {f"layer{n}": {"noise": size} for n, size in enumerate(sizes)}
        return structs.replace(measured_on("cpu", sum(sizes)), modules=modules)

    said = baseline.compare([measured(8, 8, 8, 8, 9)], measured(9, 11, 12, 10, 1), 0.02, tmp_path)
    assert said is not None
    assert re.findall("in (layer[0-9])", said) == ["layer2", "layer1", "layer3"]


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


def test_one_process_updates_a_file_at_a_time(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    with baseline._locked(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
