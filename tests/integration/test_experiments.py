# SPDX-License-Identifier: Apache-2.0
"""Runs of known configurations: in processes of their own, their figures against formulas, and what goes wrong."""

import gc
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from opacus_memprof import cli
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import presets, process, training
from opacus_memprof.experiments.configuration import MODES, Configuration
from opacus_memprof.experiments.engine import run_grid
from opacus_memprof.experiments.grid import methods
from opacus_memprof.experiments.presets import EXPERIMENTS
from tests.unit.event_files import EventFile
from tests.unit.sweep_results import failed, out_of_memory, typed

VOCABULARY, WIDTH, LAYERS, TOKENS, BATCH = 256, 64, 2, 16, 4
TINY = Configuration(seq_length=TOKENS, batch_size=BATCH, num_steps=2, warmup_steps=1, device="cpu")
# Embeddings; in a block two LayerNorms, qkv, out, up and down with their biases; the last LayerNorm; the head.
PARAMETERS = (
    (VOCABULARY + TOKENS) * WIDTH
    + LAYERS * (4 * WIDTH + 12 * WIDTH**2 + (3 + 1 + 4 + 1) * WIDTH)
    + 2 * WIDTH
    + VOCABULARY * WIDTH
)
TENSORS = 2 + LAYERS * 12 + 2 + 1
MB = 2**20

KEYS_OF_A_BREAKDOWN = {
    "model_parameters_mb",
    "optimizer_states_mb",
    "gradients_mb",
    "activation_hooks_mb",
    "norm_samples_mb",
    "temp_matrices_mb",
    "total_allocated_mb",
    "peak_allocated_mb",
}


def run_command(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `opacus-memprof ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["opacus-memprof", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def sizes(directory: Path) -> list[str]:
    return [f"--{name}={value}" for name, value in (("seq_len", TOKENS), ("batch-size", BATCH), ("device", "cpu"))] + [
        "--config=tiny",
        "--num_iter=2",
        "--warmup-iter=1",
        f"--output-dir={directory}",
        "--pause=0",
    ]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vanilla and ghost clipping, by the command."""
    directory = tmp_path_factory.mktemp("suite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEQ_LEN", "7")  # an option wins over the environment
        arguments = ["experiments", "--experiment", "ghost", "--experiment", "vanilla", *sizes(directory)]
        assert run_command(arguments, patch) == 0
    return directory


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("mode", ["vanilla", "ghost"])
def test_a_result_is_as_documented(suite: Path, mode: str) -> None:
    result = read(suite / f"{mode}_result.json")
    assert (result["experiment"], result["status"], result["error"]) == (mode, "finished", None)
    assert result["config"] == replace(TINY, mode=mode).to_json()  # type: ignore[arg-type]
    assert result["breakdown"].keys() >= KEYS_OF_A_BREAKDOWN
    assert len(result["step_times_ms"]) == 2
    assert result["avg_time_ms"] == pytest.approx(sum(result["step_times_ms"]) / 2)
    names = [snapshot["name"] for snapshot in result["snapshots"]]
    assert names[:3] == ["0_model_loaded", "1_data_prepared", "2_optimizer_set_up"]
    assert names[-4:] == [
        f"{len(names) - 5 + index}_step_1_{part}" for index, part in enumerate(["forward", "backward", "optimizer"], 1)
    ] + ["end"]
    for snapshot in result["snapshots"]:
        assert snapshot.keys() >= {"name", "allocated_mb", "reserved_mb", "timestamp"}
        assert sum(snapshot["categories"].values()) == snapshot["requested_bytes"]
        assert snapshot["remainder"] == 0
    assert result["data"] == {"source": "synthetic", "reason": "random tokens: random weights have no tokenizer"}
    document = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    section = document.partition("## The result of one run")[2]
    documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", section, re.MULTILINE))))
    assert set(result) == documented - {"virtual"}  # which only runs on virtual GPUs have


@pytest.mark.parametrize("mode", ["vanilla", "ghost"])
def test_the_figures_are_the_profile_s_and_the_formulas_(suite: Path, mode: str) -> None:
    result = read(suite / f"{mode}_result.json")
    profile = read(suite / result["profile"] / "profile.json")["devices"]["cpu"]
    assert result["peak"] == profile["peak"]
    assert result["phases"] == profile["phases"]
    peak = result["peak"]["requested_bytes"]
    categories = {key: size for key, size in result["breakdown"].items() if "_allocated_" not in key}
    assert sum(categories.values()) * MB == pytest.approx(peak, abs=1e-3)
    assert result["peak_memory_mb"] == result["breakdown"]["total_allocated_mb"] == peak / MB
    assert max(result["timeline"]["bytes"]) == max(entry["peak_bytes"] for entry in result["snapshots"]) == peak
    # By hand: weights; two moments and one step counter of 4 bytes for each parameter.
    assert result["parameters"] == {"total": PARAMETERS, "trainable": PARAMETERS}
    assert categories["model_parameters_mb"] * MB == pytest.approx(4 * PARAMETERS)
    assert categories["optimizer_states_mb"] * MB == pytest.approx(2 * 4 * PARAMETERS + 4 * TENSORS)
    loaded = result["snapshots"][0]
    assert loaded["categories"]["model_parameters"] == 4 * PARAMETERS
    assert loaded["allocated_mb"] * MB == loaded["allocated_bytes"]


def test_the_tax_is_the_difference_of_the_peaks(suite: Path) -> None:
    vanilla, ghost = (read(suite / f"{mode}_result.json") for mode in ("vanilla", "ghost"))
    assert vanilla["tax"] is None
    tax = ghost["tax"]["devices"]["cpu"]
    assert tax["total"] == ghost["peak"]["requested_bytes"] - vanilla["peak"]["requested_bytes"]
    assert sum(tax["categories"].values()) == tax["total"]


def test_the_pictures_are_there_and_can_be_drawn_again(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"memory_breakdown_comparison", "memory_timeline", "performance_tradeoff"}
    wanted = {f"{name}{suffix}.png" for name in names for suffix in ("", "_dark")}
    wanted |= {"summary.txt", "memory_table.tex", "memory_profile_summary.csv", "results.jsonl"}
    assert {path.name for path in (suite / "visualizations").iterdir()} == wanted
    alone = tmp_path / "results"  # the JSON files, and nothing else
    alone.mkdir()
    for path in suite.glob("*_result.json"):
        (alone / path.name).write_bytes(path.read_bytes())
    assert run_command(["draw", "--input_dir", str(alone), "--output-dir", str(tmp_path / "again")], monkeypatch) == 0
    for name in wanted:
        assert (tmp_path / "again" / name).read_bytes() == (suite / "visualizations" / name).read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_every_method_trains_with_a_smaller_physical_batch(mode: Any, tmp_path: Path) -> None:
    gc.collect()  # the model before is part of cycles, and would count
    result = training.train(replace(TINY, mode=mode, max_physical_batch_size=2), tmp_path / "profile")
    assert (result["status"], result["error"]) == ("finished", None)
    assert result["progress"]["steps_completed"] == 3
    assert result["peak"]["categories"]["model_parameters"] == 4 * PARAMETERS
    steps = [entry["logical_step"] for entry in result["steps"]]
    assert steps.count(0) == steps.count(1) == 2 - (mode == "vanilla")  # vanilla's optimizer steps once for both


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vanilla, in parts and at once: the weights that result are the same."""
    build, kept = training.models.build_model, []

    def build_and_keep(*arguments: Any) -> Any:
        kept.append(build(*arguments))
        return kept[-1]

    monkeypatch.setattr(training.models, "build_model", build_and_keep)
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)  # Adam makes much of rounding
    for physical in (None, 2, 3):
        chosen = replace(TINY, mode="vanilla", max_physical_batch_size=physical, learning_rate=0.1)
        assert training.train(chosen, tmp_path / "profile")["status"] == "finished"
    whole, *parts = (torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) for model in kept)
    for weights in parts:
        torch.testing.assert_close(weights, whole, rtol=0, atol=1e-6)


def test_running_out_of_memory_is_a_result(tmp_path: Path) -> None:
    rows = 10**12
    result = training.train(replace(TINY, seq_length=rows), tmp_path / "profile")
    assert result["status"] == "out_of_memory"
    assert not result["refused"]
    assert result["progress"] == {"stage": "loading the model", "steps_completed": 0, "steps": 3}
    assert result["avg_time_ms"] is None
    assert read(tmp_path / "profile/profile.json")["error"].startswith("RuntimeError: ")
    (failed,) = result["out_of_memory"]
    assert failed["requested_bytes"] == 4 * WIDTH * rows  # the embedding of positions
    assert failed["live_bytes"] == sum(failed["categories"].values()) >= 4 * VOCABULARY * WIDTH
    assert result["oom_report"] == "profile/oom_report.txt"
    assert (tmp_path / result["oom_report"]).exists()


def test_the_command_says_where_memory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = typed(out_of_memory(TINY) | {"oom_report": "result.run/profile/rank_1/oom_report.txt"})
    monkeypatch.setattr(process, "run_to_file", lambda *arguments, **options: result)
    assert run_command(["experiment", "--experiment=ghost", f"--output={tmp_path / 'result.json'}"], monkeypatch) == 0
    said = capsys.readouterr().out
    assert f"report: {tmp_path}/result.run/profile/rank_1/oom_report.txt\n" in said
    assert "suggestion: physical batches of 1 (predicted peak 512.00 MiB, which fits)\n" in said


def test_a_killed_process_leaves_what_its_events_tell(tmp_path: Path) -> None:
    children: list[Any] = []

    def kill_after_two_steps(line: str) -> None:
        if line.startswith("2 of "):
            time.sleep(1)  # docs/format.md: a kill loses the last 5 milliseconds
            children[0].kill()

    result = process.run(
        replace(TINY, num_steps=10000), tmp_path, on_line=kill_after_two_steps, on_start=children.append
    )
    assert result["status"] == "killed"
    assert re.fullmatch(
        r'the process was killed by signal 9; the last that it said was "\d+ of \d+ steps.*', result["error"]
    )
    assert result == read(tmp_path / "result.json")
    assert result["progress"]["steps_completed"] >= 2
    read_events, peak_bytes = documented_reader()
    events = read_events(tmp_path / "profile")[0]
    assert result["progress"]["steps_completed"] == (events["kind"] == 4).sum()
    assert result["peak"]["requested_bytes"] == peak_bytes(events, 0)


def documented_reader() -> Any:
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", document, re.DOTALL)[1], names)  # type: ignore[index]
    return names["read_events"], names["peak_bytes"]


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
    said: list[str] = []
    result = process.run(TINY, tmp_path / "run", token="hf_secret", gpu=1, on_line=said.append)
    assert result["status"] == "failed"
    assert result["error"] == 'the process ended with exit code 3; the last that it said was "token: ***, device: 6"'
    assert said == ["token: ***, device: 6"]
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
        (["--config=nothing"], 'there is no built-in configuration "nothing": use tiny, transformer, gpt2'),
        (["--config=tiny", "--model_name=x"], "--config tiny and --model-name x are two models"),
        (["--model-name=x", "--hidden-dim=8"], 'hidden_dim cannot be set for the model "x"'),
        (["--output=result"], "result is no place for a result: give the name of a file that ends in .json"),
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
    said = capsys.readouterr().err
    assert said.startswith(f"opacus-memprof: {sentence}")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_directories_without_results_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, sentence in (
        (None, "there is no result in"),
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"experiment": "hooks"}', "is not an experiment's result"),
        ('{"experiment": "hooks", "breakdown": {}, "format": 2}', "has format 2, and this release reads up to 1"),
        ('{"experiment": "hooks", "breakdown": {}, "format": 1}', "is not the profiler's, for it lacks config"),
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


def test_the_document_s_own_categories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/experiments.md", "exec"), {})
    cpu = read(tmp_path / "profile_with_own_categories" / "profile.json")["devices"]["cpu"]
    assert cpu["peak"]["modules"]["1"]["seen"] == cpu["peak"]["categories"]["seen"] == 4 * 10 * 64 * 100
    after_forward = cpu["snapshots"][0]["categories"]
    assert after_forward["seen"] == 4 * 10 * 64 * 100
    assert after_forward["scores"] == 4 * 64 * 64  # what sigmoid returned; the product went with the method


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
    monkeypatch.setattr(presets.Preset, "draw", lambda *arguments: [])
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
