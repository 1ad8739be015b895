# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof plan` on virtual GPUs: answers against closed forms."""

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch

from opacus_memprof.cli import main
from opacus_memprof.profiles.json_object import read_json_object
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.virtual_gpu.devices import GPUS

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
MIB = 2**20
MEMORY = 2**30
ROOM = MEMORY - GPUS["t4"].context_memory

pytestmark = [
    pytest.mark.usefixtures("shared_forks"),
    pytest.mark.skipif(
        sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
    ),
]


def plan(out: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return opacus_memprof("plan", "--gpu", "t4", "--memory", "1GiB", "-o", out, *arguments)


def opacus_memprof(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In this process, whose plans share what they fork their runs from."""
    command = ["opacus-memprof", *map(str, arguments)]
    printed, said = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="400"),
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return subprocess.CompletedProcess(command, ended.value.code or 0, printed.getvalue(), said.getvalue())


def in_new_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opacus_memprof", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def content(out: Path) -> dict[str, Any]:
    """Returns plan.json, checked against its published schema and its structure."""
    plain: dict[str, Any] = json.loads((out / "plan.json").read_text())
    schema = json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(plain)
    assert read_json_object(out / "plan.json", Plan) == plain
    return plain


@pytest.mark.slow
def test_the_largest_batch_of_two_modes_equals_the_closed_form(tmp_path: Path) -> None:
    script = SCRIPTS / "train_to_plan.py"
    asked = ["--search", "batch-size=20..64", "--modes", "single,double", script, "--batch-size=3"]
    planned = plan(tmp_path, *asked)
    assert planned.returncode == 0, planned.stderr
    cells = content(tmp_path)["cells"]
    # A batch is one block, which the allocator takes from the GPU as it is; small tensors share one block of 2 MiB.
    expected = [(ROOM - 2 * MIB) // (16 * MIB), (ROOM - 2 * MIB) // (32 * MIB)]
    assert [cell["largest"] for cell in cells] == expected == [58, 29]
    for cell, best, size in zip(cells, expected, (16 * MIB, 32 * MIB), strict=True):
        runs = {run["value"]: run for run in cell["runs"]}
        assert runs[best]["fits"]
        assert not runs[best + 1]["fits"]
        assert runs[best]["may_reserve_bytes"] == ROOM
        assert 0 <= runs[best]["requested_bytes"] - best * size < 2 * MIB
        assert cell["computed"]["bytes_per_value"] == pytest.approx(size, rel=1e-3)
    assert f"batch-size={best} was run and fits, {best + 1} was run and does not fit" in planned.stdout
    assert json.loads((tmp_path / "profile.json").read_text())["status"] == "finished"

    before = (tmp_path / "runs.jsonl").read_text()
    again = plan(tmp_path, "--resume", *asked)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "runs.jsonl").read_text() == before
    assert content(tmp_path)["cells"] == cells


@pytest.mark.slow
def test_which_gpu(tmp_path: Path) -> None:
    """16 000 MiB are more than a T4 has, and less than an L4."""
    planned = in_new_process(
        "plan", "--gpu", "l4,t4", "-o", tmp_path, SCRIPTS / "train_to_plan.py", "--batch-size", "1000"
    )
    assert planned.returncode == 0, planned.stderr
    assert "the smallest GPU that fits: l4 (21.99 GiB)" in planned.stdout
    found = content(tmp_path)
    assert found["smallest_gpus"] == [{"candidate": "", "gpu": "l4", "memory_bytes": GPUS["l4"].total_memory}]
    assert [(cell["gpu"], cell["gpu_memory_bytes"], cell["runs"][0]["fits"]) for cell in found["cells"]] == [
        (kind, GPUS[kind].total_memory, kind == "l4") for kind in ("l4", "t4")
    ]


@pytest.mark.slow
def test_what_does_not_fit_has_advice_that_was_tried(tmp_path: Path) -> None:
    batch, width = 1024, 512
    planned = plan(tmp_path, SCRIPTS / "train_cuda.py", "--width", str(width), "--batch", str(batch))
    assert planned.returncode == 3, planned.stderr
    verdict = content(tmp_path)["verdict"]
    profiled = json.loads(
        (tmp_path / "runs")
        .joinpath(Path(verdict["with_more_memory"]["directory"]).name, "profile", "profile.json")
        .read_text()
    )["devices"]["cuda:0"]["peak"]["categories"]
    assert verdict["with_more_memory"]["categories"] == {name: size for name, size in profiled.items() if size}
    assert not verdict["fits"]
    trained = 16 * width + width + width * width + width
    whole = verdict["with_more_memory"]
    samples = 4 * batch * trained
    assert samples < whole["requested_bytes"] <= whole["reserved_bytes"]
    # Nothing is freed that could be given back: no memory below the peak, and none above what was reserved is needed.
    context = GPUS["t4"].context_memory
    assert whole["requested_bytes"] < verdict["needed_bytes"] - context < whole["reserved_bytes"] + 4 * MIB
    assert (whole["category"], whole["module"]) == ("per_sample_gradients", "2")
    assert (verdict["run"]["phase"], verdict["run"]["module"]) == ("backward", "2")
    assert verdict["spare_bytes"] == MEMORY - verdict["needed_bytes"] < 0
    first = verdict["advice"][0]
    assert first["tried"]["fits"]
    assert first["tried"]["reserved_bytes"] <= ROOM
    fix = next(line for line in planned.stdout.splitlines() if line.startswith("1  "))
    assert fix.split()[-2:] == ["fits", "tried"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "arguments", "parts"),
    [
        ("cache=1..4", [], ["has no argument cache (train_to_plan.py: error: unrecognized arguments: --cache"]),
        ("seed=1..9", [], ["train_to_plan.py does not depend on seed"]),
        (
            "batch-size=100..200",
            [],
            [
                "not even batch-size=100 fits into the 944.17 MiB that may be reserved on t4 (it",
                "): use a GPU with more memory",
            ],
        ),
        ("batch-size=1..2", ["--steps", "0"], ["ended before its first training step"]),
    ],
    ids=["no such argument", "does not depend on it", "nothing fits", "no step"],
)
def test_what_cannot_be_planned_is_one_sentence(
    tmp_path: Path, search: str, arguments: list[str], parts: list[str]
) -> None:
    planned = plan(tmp_path, "--search", search, SCRIPTS / "train_to_plan.py", *arguments)
    assert planned.returncode == 2
    for part in parts:
        assert part in planned.stderr
    assert planned.stderr.startswith("opacus-memprof: ")
    assert len(planned.stderr.splitlines()) == 1


TYPER = """
import typer
app = typer.Typer()
@app.command()
def main(): pass
app()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "search", "reason"),
    [
        ("def train(:", [], "broken.py failed on the virtual GPU (SyntaxError: invalid syntax)"),
        ("import os; os._exit(3)", [], "broken.py failed on the virtual GPU (it printed nothing)"),
        (TYPER, ["--search", "batch=1..9"], "broken.py has no argument batch (No such option: --batch"),
        ("batch_size = 12\nassert 0, 'no dashes'", ["--search", "b=1..9"], "if it has no argument b, search /"),
    ],
    ids=["syntax error", "silent", "typer's frame", "a constant"],
)
def test_a_failure_before_torch_is_the_program_s_own(
    tmp_path: Path, source: str, search: list[str], reason: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    planned = plan(tmp_path / "plan", *search, tmp_path / "broken.py")
    assert planned.returncode == 2
    assert reason in planned.stderr
    assert len(planned.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_decision_by_unknown_values_is_named(tmp_path: Path) -> None:
    script = SCRIPTS / "train_deciding.py"
    line = next(i for i, text in enumerate(script.read_text().splitlines(), 1) if "bool(" in text)
    asked = plan(tmp_path / "unknown", script)
    assert f"train_deciding.py:{line}" in asked.stdout
    assert "read values that the virtual GPU does not compute, and got zeros" in asked.stdout
    assert "opacus_memprof.virtual_gpu.active() is not None" in asked.stdout
    fixed = plan(tmp_path / "fixed", script, "--planned")
    assert "note:" not in fixed.stdout
    peaks = [content(tmp_path / name)["verdict"]["run"]["requested_bytes"] for name in ("unknown", "fixed")]
    assert peaks[1] - peaks[0] == 2**28 - 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--search", "batch-size=9..1"], "is a range with nothing in it"),
        (["--search", "batch-size"], "is not of the form ARGUMENT=LOW..HIGH"),
        (["--gpu", "h100,h300"], 'there is no virtual GPU "h300"'),
        (["--modes", "mode="], "names no modes"),
        (["--memory", "24 apples"], "is not a size"),
        (["--settings", "True"], "is not of the form KEY:VALUE"),
        (["--search", "n=1..4", "--search", "n=2"], "names n twice"),
        (["--steps", "9", "--settings", "a:1,2"], "--steps is for one configuration"),
        (["--gpu", ""], 'there is no virtual GPU ""'),
    ],
)
def test_bad_options_are_refused_before_anything_runs(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    from typer.testing import CliRunner

    from opacus_memprof.cli import app
    from opacus_memprof.errors import MemprofError

    refused = CliRunner().invoke(app, ["plan", "-o", str(tmp_path / "out"), *arguments, __file__])
    assert isinstance(refused.exception, MemprofError)
    assert sentence in str(refused.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_drawn_batches_run_out_as_often_as_the_binomial_says(tmp_path: Path) -> None:
    steps = 2000
    planned = plan(tmp_path, "--memory", "700MiB", "--steps", str(steps), SCRIPTS / "train_poisson.py")
    assert planned.returncode == 3, planned.stderr
    assert content(tmp_path)["verdict"]["fits"]  # the few batches that it has drawn
    draws = content(tmp_path)["draws"]
    assert (draws["samples"], draws["rate"], draws["steps"]) == (2000, 0.02, steps)
    best = draws["largest_batch_that_fits"]
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    alone = {line["configuration"]["changes"][0]["value"]: line["run"] for line in lines if _draws_alone(line)}
    assert sorted(alone) == draws["ran"]
    assert alone[best]["fits"]
    assert not alone[best + 1]["fits"]
    assert alone[best]["samples"] == best
    # Hooks make a sample's gradient, and Opacus keeps a copy of it: 4 MiB each.
    grown = alone[best]["requested"] - alone[40]["requested"]  # 40 is the mean, where the search begins
    assert grown == pytest.approx((best - 40) * 8 * MIB, rel=0.01)
    expected = -math.expm1(steps * math.log1p(-float(1 - _at_most(best))))
    assert draws["out_of_memory_probability"] == pytest.approx(expected, rel=1e-6)
    assert draws["with_it"]["fits"]
    assert draws["with_it"]["samples"] == draws["max_physical_batch_size"] <= best


@pytest.mark.nightly
def test_a_seeded_training_ends_at_its_first_too_large_batch(tmp_path: Path) -> None:
    """The training itself, with the batches that one seed draws, ends where the plan says."""
    memory, steps, script = "500MiB", 2000, SCRIPTS / "train_poisson.py"
    planned = plan(tmp_path / "plan", "--memory", memory, "--steps", str(steps), script)
    assert planned.returncode == 3, planned.stderr
    fits = content(tmp_path / "plan")["draws"]["largest_batch_that_fits"]
    command = ["run", "--virtual-gpu", "t4", "--virtual-memory", memory, "-o", tmp_path / "run", script, steps, 7]
    trained = in_new_process(*command)
    assert "OutOfMemoryError" in trained.stderr
    *before, last = map(int, re.findall(r"^batch of (\d+)$", trained.stdout, re.MULTILINE))
    assert max(before) <= fits < last
    # So late only 1 training in 10 000 ends.
    assert float(_at_most(fits)) ** len(before) > 1e-4


def _at_most(size: int) -> Fraction:
    """The probability that a batch of train_poisson.py has at most this size."""
    return sum(
        (Fraction(math.comb(2000, each) * 49 ** (2000 - each), 50**2000) for each in range(size + 1)), Fraction()
    )


def _draws_alone(line: dict[str, Any]) -> bool:
    return [change["kind"] for change in line["configuration"]["changes"]] == ["drawn_batch"]


@pytest.mark.nightly
def test_a_rank_of_several_holds_its_shard(tmp_path: Path) -> None:
    """FSDP2's first rank of N holds an N-th of the matrix, and else what it holds with other N."""
    script = SCRIPTS / "train_sharded.py"
    peaks = {}
    for ranks in (2, 8):
        planned = plan(tmp_path / str(ranks), "--gpus", str(ranks), script)
        assert planned.returncode == 0, planned.stderr
        found = content(tmp_path / str(ranks))
        assert found["ranks"] == ranks
        peaks[ranks] = found["verdict"]["run"]["requested_bytes"]
    matrix = 4096 * 4096 * 4
    assert peaks[2] - peaks[8] == matrix // 2 - matrix // 8


@pytest.mark.slow
def test_settings_and_listed_values_make_a_table(tmp_path: Path) -> None:
    asked = ["--settings", "expandable_segments:True,False", "--search", "mode=single,double"]
    planned = plan(tmp_path, *asked, SCRIPTS / "train_to_plan.py", "--batch-size", "3")
    assert planned.returncode == 0, planned.stderr
    cells = content(tmp_path)["cells"]
    expandable, plain = "expandable_segments:True", "expandable_segments:False"
    assert [(cell["fixed"], cell["settings"]) for cell in cells] == [
        ({"mode": mode}, settings) for mode in ("single", "double") for settings in (plain, expandable)
    ]
    for cell in cells:
        (run,) = cell["runs"]
        batch = {"single": 3 * 16 * MIB, "double": 3 * 32 * MIB}[cell["fixed"]["mode"]]
        small = 2 * MIB  # one segment, or one part of an expandable one, for what is small
        assert run["fits"]
        # Expandable segments grow by 20 MiB for large blocks.
        reserved = batch if cell["settings"] == plain else -(-batch // (20 * MIB)) * 20 * MIB
        assert run["reserved_bytes"] == reserved + small
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 4
