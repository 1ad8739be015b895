# SPDX-License-Identifier: Apache-2.0
"""Experiments that cannot be run, results that cannot be read, and files of others that stay as they are."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import methods
from opacus_memprof.experiments.directory import EXPERIMENTS, Preset
from opacus_memprof.experiments.engine import run_grid
from tests.integration.test_experiments import TINY, run_command
from tests.unit.event_files import EventFile
from tests.unit.sweep_results import failed, typed


@pytest.fixture
def failing_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A python that says what it was given, and fails."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\necho "> token: $HF_TOKEN, device: $CUDA_VISIBLE_DEVICES"\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(python))


@pytest.mark.usefixtures("failing_python")
def test_the_token_goes_through_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    printed: list[str] = []
    result = process.run(TINY, tmp_path / "run", token="hf_secret", gpu=1, on_line=printed.append)
    assert result["status"] == "failed"
    assert result["error"] == 'the process ended with exit code 3; the last that it said was "token: ***, device: 6"'
    assert printed == ["token: ***, device: 6"]
    log = [f"-m opacus_memprof.experiments {tmp_path / 'run'}", "> token: ***, device: 6"]
    assert (tmp_path / "run" / "log.txt").read_text().splitlines() == log
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) == 3
    assert not any("hf_secret" in text for text in written)
    with pytest.raises(MemprofError, match="there is no GPU 2: CUDA_VISIBLE_DEVICES leaves 2"):
        process.run(TINY, tmp_path / "run", gpu=2)


@pytest.mark.usefixtures("failing_python")
def test_other_files_where_the_profile_goes_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "result.run" / "profile" / "theirs.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("keep me")
    with pytest.raises(MemprofError, match="holds files that are not a profile"):
        process.run_to_file(tmp_path / "result.json", TINY)
    assert theirs.read_text() == "keep me"
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("profiles", "theirs"),
    [
        ([""], "notes.txt"),
        (["rank_0", "rank_1"], "rank_1/notes.txt"),
        (["rank_0", "rank_1"], "notes.txt"),
    ],
)
def test_beside_other_files_a_profile_stays_as_well(tmp_path: Path, profiles: list[str], theirs: str) -> None:
    """Without its events the process that trains would not know it for a profile, and refuse."""
    there = tmp_path / "profile"
    for name in profiles:
        (there / name).mkdir(parents=True)
        EventFile().add("alloc", 1, 300, "activations").write(there / name)
    (there / theirs).write_text("mine")
    (tmp_path / "result.json").write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(MemprofError, match="holds files that are not a profile"):
        process.run(TINY, tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    (there / theirs).rename(there / "memprof.html")  # a report of it may stay
    process._clear_profile(there)
    assert [file.name for file in there.iterdir()] == ["memprof.html"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seq-len=0"], "seq_length is 0: give a whole number from 1 on"),
        (["--batch_size=-1"], "batch_size is -1: give a whole number from 1 on"),
        (["--num_heads=3"], "3 heads do not divide a width of 2048"),
        (
            ["--config=nothing"],
            'there is no built-in configuration "nothing": use tiny, transformer, transformer-relu, gpt2',
        ),
        (["--config=tiny", "--model_name=x"], "--config tiny and --model-name x are two models"),
        (["--model-name=x", "--hidden-dim=8"], 'hidden_dim cannot be set for the model "x"'),
        (["--output=result"], "result is not a file name for a result: give one that ends in .json"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["experiment", "--experiment=hooks", "--output=result.json", *arguments], monkeypatch) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"opacus-memprof: {sentence}")
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_directories_without_results_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, sentence in (
        (None, "there is no result in"),
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"experiment": "hooks"}', "is not the result of an experiment"),
        ('{"experiment": "hooks", "breakdown": {}, "format": 2}', "has format 2, and this release reads up to 1"),
        ('{"experiment": "hooks", "breakdown": {}, "format": 1}', "is not the profiler's, because it lacks config"),
    ):
        if content is not None:
            (tmp_path / "result.json").write_text(content)
        assert run_command(["draw", "--input-dir", str(tmp_path)], monkeypatch) == 2
        assert sentence in capsys.readouterr().err
        assert not (tmp_path / "visualizations").exists()
    assert run_command(["draw", "--input-dir", str(tmp_path / "none")], monkeypatch) == 2


def test_a_refused_training_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"
    output.write_text("before")
    refused = typed(failed(TINY) | {"refused": True, "error": "cannot be loaded"})
    monkeypatch.setattr(process, "run", lambda *arguments, **options: refused)
    with pytest.raises(MemprofError, match="cannot be loaded"):
        process.run_to_file(output, TINY)
    assert output.read_text() == "before"


REFUSING = """#!{python}
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import read_json, write_json
from tests.unit.sweep_results import failed

directory = Path(sys.argv[3])
configuration = Configuration.from_json(read_json(directory / "configuration.json"))
write_json(directory / "result.json", failed(configuration) | {{"refused": configuration.mode == {refused!r}}})
"""


@pytest.mark.parametrize("refused", ["vanilla", "ghost"])
def test_a_suite_ends_where_its_first_training_is_refused(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one may meet layers that its mode does not know: that is a result."""
    python = tmp_path / "python"
    root = str(Path(__file__).parents[2])
    python.write_text(REFUSING.format(python=sys.executable, root=root, refused=refused))
    python.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(python))
    monkeypatch.setattr(Preset, "draw", lambda *arguments: [])
    cells, results = methods(TINY, ["ghost", "vanilla"]), tmp_path / "results"
    if refused == "vanilla":
        with pytest.raises(MemprofError, match="ValueError while loading"):
            run_grid(EXPERIMENTS, cells, results, Console())
        assert not results.exists()
    else:
        rows = run_grid(EXPERIMENTS, cells, results, Console())
        assert [row.result["refused"] for row in rows] == [False, True]
        names = {"vanilla_result.json", "ghost_result.json", "manifest.json"}
        assert {path.name for path in results.glob("*.json")} == names
