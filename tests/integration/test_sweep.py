# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof sweep` and `single-gpu` as they are called: what ends them, what goes on, and what is left behind.

Most runs here are trained by a child that only says it has trained: then a sweep of several takes no time.
"""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opacus_memprof.cli import main
from opacus_memprof.experiments.directory import Preset

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
FOUR = ["sweep", "--config", "tiny", "--device", "cpu", "--seq_lengths", "16", "32", "--batch_sizes", "8"]
FOUR += ["--max_physical_batch_sizes", "1", "2", "--lora-ranks", "0"]
NAMES = [f"seq{length}_batch8_physical{size}_full" for length in (16, 32) for size in (1, 2)]

# Stands in for python: called as `python -m opacus_memprof.experiments DIRECTORY`. `{special}` is of one cell.
CHILD = """#!{python}
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import read_json, write_json
from tests.unit.sweep_results import failed, finished

directory = Path(sys.argv[3])
with open({log!r}, "a") as log:
    log.write(directory.name + "\\n")
configuration = Configuration.from_json(read_json(directory / "configuration.json"))
result = finished(configuration)
if directory.name == {name!r}:
    {special}
write_json(directory / "result.json", result)
"""

Child = Callable[..., Path]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Makes the stand-in; what it has been asked to run is in tmp_path/log."""

    def make(special: str = "pass", name: str = NAMES[2]) -> Path:
        path = tmp_path / "python"
        path.write_text(
            CHILD.format(python=PYTHON, root=str(ROOT), log=str(tmp_path / "log"), name=name, special=special)
        )
        path.chmod(0o755)
        return path

    return make


def run_cli(arguments: list[str], python: Path | str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `opacus-memprof ARGUMENTS`, whose trainings are `python`'s."""
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "argv", ["opacus-memprof", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes before them."""
    monkeypatch.setattr(Preset, "draw", lambda *arguments: [])


def trained(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def summary(directory: Path) -> list[dict[str, str]]:
    with open(directory / "memory_profile_summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_killed_sweep_goes_on(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    arguments = [*FOUR, "--results_dir", str(results), "--token", "hf_secret"]
    program = (
        f"import sys; sys.executable = {str(child('time.sleep(60)'))!r}; from opacus_memprof.cli import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([PYTHON, "-c", program, *arguments], env=environment) as sweep:
        deadline = time.monotonic() + 60
        while not (tmp_path / "log").exists() or len(trained(tmp_path)) < 3:
            assert time.monotonic() < deadline
            assert sweep.poll() is None
            time.sleep(0.05)
        while len(json.loads((results / "memory_profile_results.json").read_text())["results"]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        sweep.kill()
    assert [row["name"] for row in summary(results)] == NAMES[:2]

    assert run_cli(arguments, child(), monkeypatch) == 2  # without --resume nothing is touched
    assert run_cli([*arguments, "--resume"], child(), monkeypatch) == 0
    assert trained(tmp_path) == [*NAMES[:3], *NAMES[2:]]
    assert [(row["name"], row["status"]) for row in summary(results)] == [(name, "finished") for name in NAMES]
    drawn = {"memory_analysis_overview.png", "memory_heatmap.png"}
    drawn |= {f"memory_timeline_config_{name}.png" for name in NAMES}
    assert drawn <= {path.name for path in results.iterdir()}
    assert not [path for path in results.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]

    capsys.readouterr()
    assert run_cli([*arguments, "--resume", "--detailed"], child(), monkeypatch) == 0  # only what can be drawn from it
    printed = capsys.readouterr().out
    assert "4 of 4 configurations have a result already" in printed
    assert "0/0" not in printed
    assert len(trained(tmp_path)) == 5
    assert (results / "operation_level_breakdown.png").exists()


@pytest.mark.parametrize("command", ["sweep", "plan"])
def test_ctrl_c_says_what_continues(command: str, tmp_path: Path, child: Child) -> None:
    python = child("time.sleep(60)", NAMES[0])
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'log')!r}, 'w').close(); import time; time.sleep(60)")
    arguments = {
        "sweep": [*FOUR, "--results_dir", str(tmp_path / "my results")],
        "plan": ["plan", "--gpu", "t4", "-o", str(tmp_path / "plan"), str(script)],
    }[command]
    program = f"import sys; sys.executable = {str(python)!r}; " if command == "sweep" else "import sys; "
    program += "from opacus_memprof.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = [PYTHON, "-c", program, *arguments]
    with subprocess.Popen(asked, env=environment, text=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        deadline = time.monotonic() + 60
        while not (tmp_path / "log").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    place = f"--results-dir '{tmp_path}/my results' " if command == "sweep" else ""
    assert f"opacus-memprof: stopped; the same command with {place}--resume" in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("no_pictures")
def test_a_killed_run_is_a_result_and_run_again(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*FOUR, "--results_dir", str(tmp_path / "results")]
    assert run_cli(arguments, child("os.kill(os.getpid(), signal.SIGKILL)"), monkeypatch) == 1
    assert [row["status"] for row in summary(tmp_path / "results")] == ["finished", "finished", "killed", "finished"]
    assert "killed by signal 9" in capsys.readouterr().out
    assert run_cli([*arguments, "--resume"], child(), monkeypatch) == 0
    assert trained(tmp_path) == [*NAMES, NAMES[2]]
    assert {row["status"] for row in summary(tmp_path / "results")} == {"finished"}


def test_what_is_refused_leaves_nothing(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = 'result = failed(configuration) | {"refused": True, "error": "the model \\"x\\" cannot be loaded: do y"}'
    python = child(refused, NAMES[0])
    assert run_cli([*FOUR, "--results_dir", str(tmp_path / "results")], python, monkeypatch) == 2
    assert 'opacus-memprof: the model "x" cannot be loaded: do y' in capsys.readouterr().err
    assert trained(tmp_path)[0] == NAMES[0]
    assert not (tmp_path / "results").exists()


def test_single_runs_are_compared(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    command = ["single-gpu", "--config", "tiny", "--device", "cpu", "--results_dir", str(results), "--seq_length", "16"]
    assert run_cli([*command, "--batch_size", "8"], child(), monkeypatch) == 0
    assert run_cli([*command, "--batch_size", "8", "--use_lora", "--lora_rank", "4"], child(), monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "model tiny (random weights), mode hooks, bf16, device cpu\n" in printed
    assert "sequence length 16, batch 8, physical batch 1, training LoRA adapters of rank 4\n" in printed
    assert "learning rate 1e-05, sigma 1, max_grad_norm 1, 5 steps\n" in printed
    names = ["seq16_batch8_physical1_full", "seq16_batch8_physical1_lora4"]
    assert [row["name"] for row in summary(results)] == trained(tmp_path) == names
    files = {"memory_profile_results.json", "memory_usage_timeline.png", "peak_memory_comparison.png"}
    assert files <= {path.name for path in results.iterdir()}


@pytest.mark.usefixtures("no_pictures")
def test_all_single_runs(tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    arguments = ["single-gpu", "--config", "tiny", "--device", "cpu", "--results_dir", str(results), "--run_all"]
    assert run_cli(arguments, child(), monkeypatch) == 0
    assert [row["name"] for row in summary(results)] == trained(tmp_path)
    assert len(set(trained(tmp_path))) == 9


@pytest.mark.usefixtures("no_pictures")
def test_the_documented_detailed_analysis(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no list of ranks: its models have adapters of one."""
    results = tmp_path / "detailed_results"
    lists = ["--seq_lengths", "128", "256", "--batch_sizes", "8", "16", "--max_physical_batch_sizes", "1", "2"]
    arguments = ["sweep", "--detailed", "--config", "tiny", "--device", "cpu", *lists, "--num_steps", "3"]
    assert run_cli([*arguments, "--token", "x", "--results_dir", str(results)], child(), monkeypatch) == 0
    names = [f"seq{s}_batch{b}_physical{p}_lora16" for s in (128, 256) for b in (8, 16) for p in (1, 2)]
    assert [row["name"] for row in summary(results)] == names
    details = json.loads((results / "detailed_memory_results.json").read_text())["results"]
    assert [entry["name"] for entry in details] == names
    printed = capsys.readouterr().out
    ends = [line for line in printed.splitlines() if re.match(r"seq.* of 8\b", line)]
    assert [line.split()[0] for line in ends] == names
    assert ["left]" in line for line in ends] == [True] * 7 + [False]
    assert printed.count("By component:") == 1  # of the largest
    assert "8 finished. The results are in" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*FOUR, "--batch_sizes", "0"], "--batch_sizes has 0: give whole numbers from 1 on"),
        ([*FOUR, "--seq_lengths", "-5"], "--seq_lengths has -5: give whole numbers from 1 on"),
        ([*FOUR, "--lora_ranks"], "--lora_ranks has no values: give it at least one"),
        ([*FOUR[:-5], "--max_physical_batch_sizes", "16", "32"], "no combination is possible"),
        ([*FOUR, "--num_steps", "0"], "num_steps is 0"),
        ([*FOUR, "--model_name", "gpt2"], "are two models: give one of them"),
        (["sweep", "--config", "huge"], 'there is no built-in configuration "huge"'),
        (["single-gpu", "--config", "tiny", "--max_physical_batch_size", "64"], "max_physical_batch_size is 64 and"),
        (["single-gpu", "--config", "tiny", "--use_lora", "--lora_rank", "0"], "lora_rank is 0"),
        (["single-gpu", "--config", "tiny", "--sigma", "-1"], "sigma is -1"),
        (["single-gpu", "--config", "tiny", "--mode", "ew", "--checkpointing"], "checkpointing is not possible here"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_cli([*arguments, "--results-dir", str(tmp_path / "results")], "/nowhere/python", monkeypatch) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1
    assert sentence in printed[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_pictures")
def test_memory_that_runs_out_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained in earnest, by processes that may have 1.5 GB: batches of 16 tokens fit, those of 16384 do not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -d 1500000\nexec "{PYTHON}" "$@"\n')
    python.chmod(0o755)
    results = tmp_path / "results"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["sweep", "--config", "tiny", "--device", "cpu", "--dtype", "fp32", "--num_steps", "1"]
    arguments += ["--seq_lengths", "16", "16384", "--batch_sizes", "64", "--max_physical_batch_sizes", "64"]
    arguments += ["--lora_ranks", "0", "--results_dir", str(results)]
    assert run_cli(arguments, python, monkeypatch) == 0

    fits, runs_out = json.loads((results / "memory_profile_results.json").read_text())["results"]
    assert (fits["status"], runs_out["status"]) == ("finished", "out_of_memory")
    assert fits["progress"] == {"stage": "training", "steps_completed": 2, "steps": 2}
    assert runs_out["progress"]["stage"] == "training"
    for result in (fits, runs_out):
        peak = result["peak"]
        assert sum(peak["categories"].values()) == peak["requested_bytes"]
        # Two embeddings (256 and S tokens), two blocks (12 D² + 13 D), a norm and a head of 3 classes; D = 64.
        length, width = result["config"]["seq_length"], 64
        parameters = (256 + length) * width + 2 * (12 * width**2 + 13 * width) + 2 * width + 3 * width
        assert peak["categories"]["model_parameters"] == 4 * parameters
        log = (results / "runs" / result["name"] / "log.txt").read_text()
        assert f">   model loaded: {4 * parameters / 2**20:.2f} MB live\n" in log
        assert f">   {parameters:,} parameters, of which {parameters:,} are trained\n" in log
    failed = runs_out["out_of_memory"][0]
    assert failed["phase"] == "forward"
    assert failed["requested_bytes"] % (64 * 16384 * 4) == 0  # samples · tokens · bytes
    row = summary(results)[1]
    assert row["failed_allocation_phase"] == "forward"
    assert float(row["failed_allocation_mb"]) * 2**20 == failed["requested_bytes"]
