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

from opacus_memprof import cli
from opacus_memprof.experiments import process, training
from opacus_memprof.experiments.configuration import MODES, Configuration
from opacus_memprof.jobs.pool import Processes
from opacus_memprof.profiles.units import parse_size
from tests.integration.run_scripts import python
from tests.unit.sweep_results import out_of_memory, typed
from tests.warm_python import ENVIRONMENT, executable

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
    "rounding_mb",
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
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("SEQ_LEN", "7")  # an option wins over the environment
        patch.setattr(sys, "executable", executable(tmp_path_factory.mktemp("warm")))
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
    printed = capsys.readouterr().out
    assert f"report: {tmp_path}/result.run/profile/rank_1/oom_report.txt\n" in printed
    assert "suggestion: physical batches of 1 (predicted peak 512.00 MB, which fits)\n" in printed


def test_a_killed_process_leaves_what_its_events_tell(tmp_path: Path) -> None:
    processes = Processes()

    def kill_after_two_steps(line: str) -> None:
        if line.startswith("2 of "):
            time.sleep(1)  # docs/format.md: a kill loses the last 5 milliseconds
            processes.kill()

    result = process.run(replace(TINY, num_steps=10000), tmp_path, on_line=kill_after_two_steps, processes=processes)
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


def test_the_document_s_own_categories(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    done = python("-c", block, cwd=tmp_path)  # a model that is attached here would change names
    assert done.returncode == 0, done.stderr
    cpu = read(tmp_path / "profile_with_own_categories" / "profile.json")["devices"]["cpu"]
    assert cpu["peak"]["modules"]["1"]["seen"] == cpu["peak"]["categories"]["seen"] == 4 * 10 * 64 * 100
    after_forward = cpu["snapshots"][0]["categories"]
    assert after_forward["seen"] == 4 * 10 * 64 * 100
    assert after_forward["scores"] == 4 * 64 * 64  # what sigmoid returned; the product went with the method


def test_findings_count_in_the_unit_of_the_result(tmp_path: Path) -> None:
    """Sentence by sentence the sizes of the profile's findings, which have the unit that suits each."""
    chosen = Configuration(mode="hooks", seq_length=64, batch_size=4, num_steps=2, warmup_steps=1, device="cpu")
    result = training.train(chosen, tmp_path / "profile")
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text(encoding="utf-8"))
    assert [finding.kind for finding in result.findings] == [finding["kind"] for finding in profile["findings"]] != []
    size = re.compile(r"([\d.]+) ([KMG]iB|MB)\b")
    for finding, written in zip(result.findings, profile["findings"], strict=True):
        assert size.split(finding.evidence)[::3] == size.split(written["evidence"])[::3]
        found, sizes = size.findall(finding.evidence), size.findall(written["evidence"])
        assert {unit for _, unit in found} == {"MB"}
        for (value, _), (other, unit) in zip(found, sizes, strict=True):
            assert float(value) * 2**20 == pytest.approx(parse_size(f"{other} {unit}"), abs=0.011 * 2**20)
