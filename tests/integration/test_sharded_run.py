# SPDX-License-Identifier: Apache-2.0
"""A run of a known configuration in several processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import merge_results
from opacus_memprof.profiles.directory import claim
from tests.unit.event_files import EventFile
from tests.unit.sweep_results import BASE, assert_contains, failed, finished, out_of_memory


@pytest.mark.slow
def test_a_model_is_sharded_over_two_processes(tmp_path: Path) -> None:
    small = {"seq_length": 8, "batch_size": 2, "num_steps": 1, "warmup_steps": 0, "device": "cpu"}
    chosen = Configuration(mode="ghost", nproc=2, **small)
    result = process.run(chosen, tmp_path / "run")
    assert result["status"] == "finished", result["error"]
    names = [snapshot["name"].partition("_")[2] for snapshot in result["snapshots"]]
    assert names[:5] == ["model_loaded", "data_prepared", "fsdp_wrapped", "optimizer_set_up", "privacy_engine_set_up"]
    assert [row["status"] for row in result["ranks"]["ranks"]] == ["finished", "finished"]
    for row in result["ranks"]["ranks"]:
        categories = row["peak"]["categories"]
        assert categories["model_parameters"] >= 4 * result["parameters"]["total"] // 2  # padded to equal shards
        assert categories["model_parameters"] < 0.6 * 4 * result["parameters"]["total"]
    process._clear_profile(tmp_path / "run/profile")  # as a run of one process does that comes after it
    assert not list((tmp_path / "run").glob("profile/*"))


def test_of_the_ranks_results_the_one_that_says_most_stays(tmp_path: Path) -> None:
    made = {"result": finished(BASE), "result_1": out_of_memory(BASE), "result_2": failed(BASE)}
    for name, result in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    merge_results(tmp_path, "result.json", tmp_path / "profile")
    merged = json.loads((tmp_path / "result.json").read_text())
    assert merged["ranks"] is None  # no rank has left a profile
    assert_contains(merged, made["result_1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


def test_the_events_of_the_first_killed_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def killed(command: list[str], path: Path, *rest: Any) -> tuple[int, str]:
        claimed = claim(path / "profile")
        claimed.clear()
        EventFile(closed=False).add("alloc", 1, 300, "activations").write(claimed.path)
        claimed.release()
        return -9, "training"

    monkeypatch.setattr(process, "_run_child", killed)
    for _ in range(2):
        result = process.run(Configuration(mode="vanilla", nproc=2), tmp_path)
        assert (result["status"], result["profile"], result["peak"]["requested_bytes"]) == ("killed", "profile", 300)
        for folder in ("profile", "profile/rank_0"):
            (tmp_path / folder / "memprof.html").write_text("a report, which is in nobody's way")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "flash_clip"])
def test_modes_that_cannot_be_sharded_are_refused(mode: str) -> None:
    with pytest.raises(MemprofError, match="one process"):
        Configuration(mode=mode, nproc=2)  # type: ignore[arg-type]
