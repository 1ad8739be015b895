# SPDX-License-Identifier: Apache-2.0
"""Cells run as jobs, in submitit's local processes instead of a cluster. What the jobs train is made up."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import submitit_launcher
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.directory import ResultsDirectory
from opacus_memprof.experiments.grid import Cell, grid
from opacus_memprof.experiments.presets import SWEEP
from opacus_memprof.experiments.submitit_launcher import SubmititLauncher
from tests.unit.sweep_results import BASE, finished

pytest.importorskip("submitit")


@pytest.fixture
def cells() -> list[Cell]:
    return grid(BASE, [16], [8], [1, 2, 4], [0])[0]


@pytest.fixture
def directory(tmp_path: Path, cells: list[Cell]) -> Iterator[ResultsDirectory]:
    with ResultsDirectory(tmp_path / "results", SWEEP, cells) as directory:
        yield directory


def replace_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job leaves a result that says its physical batch; 2 takes a minute, 4 ends without one."""

    def train(configuration: Mapping[str, Any], directory: str) -> None:
        import json
        import os
        import time

        os.makedirs(directory)
        size = configuration["max_physical_batch_size"]
        if size == 4:
            os._exit(3)
        time.sleep(60 * (size == 2))
        with open(f"{directory}/result.json", "w") as file:
            json.dump(finished(Configuration.from_json(configuration)) | {"error": os.environ.get("HF_TOKEN")}, file)

    monkeypatch.setattr(submitit_launcher, "train", train)


def test_each_cell_is_a_job(directory: ResultsDirectory, cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    replace_training(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "")  # restored at the end
    launcher = SubmititLauncher(directory, "local", {"timeout_min": 2}, token="secret")
    with closing(launcher.run(cells)) as results:
        first, second = next(results), next(results)
    found = {cell.configuration.max_physical_batch_size: result for cell, result in (first, second)}
    assert (found[1].status, found[1].config.max_physical_batch_size) == ("finished", 1)
    assert found[1].error == "secret"  # which the job has taken from its environment
    assert found[4].status == "killed"
    assert "ended without a result" in found[4].error
    left = {cell for cell in cells if (directory.run_directory(cell.name) / "result.json").exists()}
    assert left == {cell for cell, _ in (first, second)}
    assert [cell.configuration.max_physical_batch_size for cell in directory.pending()] == [1, 2, 4]  # without --resume
    for folder, _, files in os.walk(directory.path):
        for name in files:
            if name != "result.json":
                assert b"secret" not in Path(folder, name).read_bytes()


def test_what_cannot_be_submitted_is_refused_in_a_sentence(directory: ResultsDirectory) -> None:
    with pytest.raises(MemprofError, match="--launcher-option"):
        SubmititLauncher(directory, "local", {"slurm_colour": "blue"})
    with pytest.raises(MemprofError, match="no jobs can be submitted"):
        SubmititLauncher(directory, "slurm", {})  # there is no SLURM here
