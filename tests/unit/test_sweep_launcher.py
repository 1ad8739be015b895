# SPDX-License-Identifier: Apache-2.0
"""Cells as jobs: with submitit's own processes instead of a cluster. What the jobs train is made up."""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import engine
from opacus_memprof.experiments.configuration import Cell, Configuration, grid
from opacus_memprof.experiments.directory import SWEEP, ResultsDirectory
from opacus_memprof.experiments.engine import ExecutorLauncher, cluster_launcher
from opacus_memprof.experiments.files import write_json
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

    monkeypatch.setattr(engine, "train", train)


def test_each_cell_is_a_job(directory: ResultsDirectory, cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    replace_training(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "")  # restored at the end
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 1)  # which a network's disks have for a result
    jobs = cluster_launcher(directory, "local", {"timeout_min": 2}, token="secret")
    with closing(jobs.run(cells)) as results:
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
        cluster_launcher(directory, "local", {"slurm_colour": "blue"})
    with pytest.raises(MemprofError, match="no jobs can be submitted"):
        cluster_launcher(directory, "slurm", {})  # there is no SLURM here


def test_any_executor_runs_cells(
    directory: ResultsDirectory, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(configuration: Mapping[str, Any], path: str) -> None:
        time.sleep(0.05 * configuration["max_physical_batch_size"])
        if configuration["max_physical_batch_size"] == 4:
            raise OSError("the disk is full")
        os.makedirs(path)
        write_json(Path(path, "result.json"), finished(Configuration.from_json(configuration)))

    monkeypatch.setattr(engine, "train", train)
    ended = list(ExecutorLauncher(directory, ThreadPoolExecutor(3), 3).run(cells))
    assert [(cell.configuration.max_physical_batch_size, result.status) for cell, result in ended] == [
        (1, "finished"),
        (2, "finished"),
        (4, "killed"),
    ]
    assert ended[2][1].error == "the disk is full"
