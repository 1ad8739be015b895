# SPDX-License-Identifier: Apache-2.0
"""A results directory: what it refuses, what it keeps, what is to be run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Cell, Configuration, grid, methods
from opacus_memprof.experiments.directory import EXPERIMENTS, SINGLE_GPU, SWEEP, ResultsDirectory
from opacus_memprof.experiments.files import read_result, write_json
from tests.unit.sweep_results import BASE, failed, finished, out_of_memory

CELLS, _ = grid(BASE, [16, 32], [8], [1, 2], [0])


def sweep(path: Path, cells: list[Cell] = CELLS, *, resume: bool = False) -> ResultsDirectory:
    return ResultsDirectory(path, SWEEP, cells, resume=resume)


def single(path: Path, cells: list[Cell], *, resume: bool = False) -> ResultsDirectory:
    return ResultsDirectory(path, SINGLE_GPU, cells, resume=resume)


def put(directory: ResultsDirectory, cell: Cell, result: dict) -> None:
    folder = directory.run_directory(cell.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "result.json", result)


def names(directory: ResultsDirectory) -> list[str]:
    return [row.name for row in directory.rows()]


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    with sweep(tmp_path / "r") as directory:
        assert directory.pending() == CELLS
        put(directory, CELLS[0], finished(CELLS[0].configuration))
        put(directory, CELLS[1], out_of_memory(CELLS[1].configuration))
        put(directory, CELLS[2], failed(CELLS[2].configuration))
    with sweep(tmp_path / "r", resume=True) as directory:
        assert directory.pending() == CELLS[2:]
        assert names(directory) == [cell.name for cell in CELLS[:3]]


def test_resume_begins_where_there_is_nothing(tmp_path: Path) -> None:
    with sweep(tmp_path / "r", resume=True) as directory:
        assert directory.pending() == CELLS


def test_single_runs_gather(tmp_path: Path) -> None:
    for cell in CELLS[:2]:
        with single(tmp_path, [cell]) as directory:
            assert directory.pending() == [cell]
            put(directory, cell, finished(cell.configuration))
    with single(tmp_path, CELLS[1:], resume=True) as directory:
        assert directory.pending() == CELLS[2:]
        assert names(directory) == directory.names[:2] == [cell.name for cell in CELLS[:2]]
    with single(tmp_path, CELLS[:1]) as directory:
        assert directory.pending() == CELLS[:1]  # measured anew
        assert directory.names == [cell.name for cell in CELLS]


def other_settings() -> list[Cell]:
    return [Cell(replace(cell.configuration, num_steps=9)) for cell in CELLS]


@pytest.mark.parametrize(
    ("there", "again", "sentence"),
    [
        (lambda path: sweep(path), lambda path: sweep(path), "holds results: add --resume"),
        (lambda path: sweep(path, CELLS[:3]), lambda path: sweep(path, resume=True), "another grid, of 3 config"),
        (lambda path: sweep(path), lambda path: sweep(path, other_settings(), resume=True), "num_steps 3, and.* 9"),
        (lambda path: sweep(path), lambda path: single(path, CELLS), "holds results of `opacus-memprof sweep`"),
        (lambda path: single(path, CELLS), lambda path: single(path, other_settings()), "num_steps 3, and .* 9"),
    ],
)
def test_other_results_are_refused(tmp_path: Path, there, again, sentence: str) -> None:
    with there(tmp_path):
        pass
    before = content(tmp_path)
    with pytest.raises(MemprofError, match=sentence), again(tmp_path):
        pass
    assert content(tmp_path) == before


def test_another_format_is_refused(tmp_path: Path) -> None:
    with sweep(tmp_path):
        pass
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format": 7}))
    before = content(tmp_path)
    with (
        pytest.raises(MemprofError, match="results of format 7, and this release writes 1"),
        sweep(tmp_path, resume=True),
    ):
        pass
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["thesis.tex", "memory_profile_results.json"])
def test_foreign_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for directory in (sweep(tmp_path), sweep(tmp_path, resume=True), single(tmp_path, CELLS)):
        with pytest.raises(MemprofError, match="holds files that are not results, and was not changed"), directory:
            pass
    assert content(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("manifest", ["", "[]", '{"format": 1', '{"format": 1}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(MemprofError), sweep(tmp_path, resume=True):
        pass
    assert (tmp_path / "manifest.json").read_text() == manifest


@pytest.mark.parametrize(
    ("part", "key"),
    [((), "status"), ((), "peak"), (("peak",), "categories"), (("config",), "model"), (("progress",), "stage")],
)
def test_a_damaged_result_is_refused_in_a_sentence(tmp_path: Path, part: tuple[str, ...], key: str) -> None:
    result = finished(CELLS[0].configuration)
    del (result[part[0]] if part else result)[key]
    with sweep(tmp_path) as directory:
        put(directory, CELLS[0], result)
        file = directory.run_directory(CELLS[0].name) / "result.json"
    with sweep(tmp_path, resume=True) as directory, pytest.raises(MemprofError) as refused:
        directory.pending()
    lacking = ".".join([*part, key])
    assert (
        str(refused.value)
        == f"{file} is not the profiler's, because it lacks {lacking}: remove it, or run the experiment again"
    )


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MemprofError, match="choose another --results-dir"), sweep(tmp_path / "file"):
        pass
    with pytest.raises(MemprofError, match="choose another --results-dir"), sweep(tmp_path / "file" / "below"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with sweep(tmp_path):
        before = content(tmp_path)
        with pytest.raises(MemprofError, match="is being written by another"), sweep(tmp_path, resume=True):
            pass
        assert content(tmp_path) == before
    with sweep(tmp_path, resume=True) as directory:
        assert directory.pending() == CELLS


def ended_by(error: BaseException, directory: ResultsDirectory, results: dict[Cell, dict]) -> None:
    with pytest.raises(type(error)), directory:
        _put_and_raise(error, directory, results)


def _put_and_raise(error: BaseException, directory: ResultsDirectory, results: dict[Cell, dict]) -> None:
    for cell, result in results.items():
        put(directory, cell, result)
    raise error


def test_a_call_that_was_refused_leaves_nothing(tmp_path: Path) -> None:
    first = CELLS[0]
    refused = MemprofError("there is no such model")
    ended_by(refused, sweep(tmp_path / "new"), {first: failed(first.configuration)})
    assert not (tmp_path / "new").exists()
    ended_by(MemprofError("the disk is full"), sweep(tmp_path / "measured"), {first: finished(first.configuration)})
    ended_by(KeyboardInterrupt(), sweep(tmp_path / "interrupted"), {})
    for name in ("measured", "interrupted"):
        before = content(tmp_path / name)
        ended_by(refused, sweep(tmp_path / name, resume=True), {})
        assert content(tmp_path / name) == before
        assert "manifest.json" in before


def test_methods_gather_each_with_its_result_beside_its_run(tmp_path: Path) -> None:
    def run(modes: list[str], *, resume: bool = False, base: Configuration = BASE) -> list[str]:
        """What had to be run; the names of all rows are checked."""
        cells = methods(base, modes)
        with ResultsDirectory(tmp_path, EXPERIMENTS, cells, resume=resume) as directory:
            pending = directory.pending()
            for cell in pending:
                put(directory, cell, finished(cell.configuration) | {"oom_report": "profile/oom_report.txt"})
                row = directory.add(cell, read_result(directory.run_directory(cell.name) / "result.json"))
                assert row.oom_report == f"{cell.name}_result.run/profile/oom_report.txt"
            assert directory.outputs == tmp_path / "visualizations"
            seen.append(names(directory))
        return [cell.name for cell in pending]

    seen: list[list[str]] = []
    assert run(["ghost"]) == ["ghost"]
    assert run(["vanilla", "ghost"], resume=True) == ["vanilla"]
    assert run(["vanilla"]) == ["vanilla"]  # measured anew
    assert seen == [["ghost"], ["vanilla", "ghost"], ["vanilla", "ghost"]]
    assert json.loads((tmp_path / "ghost_result.json").read_text())["profile"] == "ghost_result.run/profile"
    assert {path.name for path in tmp_path.iterdir()} == {
        "ghost_result.json",
        "ghost_result.run",
        "manifest.json",
        "vanilla_result.json",
        "vanilla_result.run",
    }
    with pytest.raises(MemprofError, match="holds results with num_steps 3, and this call has 9"):
        run(["hooks"], base=replace(BASE, num_steps=9))


def test_a_directory_that_does_not_name_a_setting_is_refused(tmp_path: Path) -> None:
    with single(tmp_path, CELLS[:1]):
        pass
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["shared"]["checkpointing"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MemprofError, match="holds results with checkpointing None"), single(tmp_path, CELLS[:1]):
        pass
