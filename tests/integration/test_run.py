# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run` on small scripts, against what plain python does with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.run_scripts import (
    ENVIRONMENT,
    RUN,
    SCRIPTS,
    TRAIN,
    assert_reconciled,
    losses,
    new_python,
    plain,
    profile_of,
    python,
)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_script_that_ends(tmp_path: Path, mode: str) -> None:
    reference = plain(TRAIN, "--mode", mode)
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, "--mode", mode)
    assert completed.returncode == 0, completed.stderr
    assert len(losses(reference.stdout)) == 3
    assert completed.stdout.startswith(reference.stdout)  # bit for bit, and then the summary
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("finished", 0)
    assert_reconciled(profile, tmp_path / "out")
    categories = profile["devices"]["cpu"]["peak"]["categories"]
    weights = (16 * 32 + 32 + 32 * 4 + 4) * 4
    assert categories["model_parameters"] == weights
    if mode == "hooks":
        assert categories["per_sample_gradients"] >= 8 * weights  # and transient copies
    assert "model_parameters" in completed.stdout[len(reference.stdout) :]
    assert str(tmp_path / "out") in completed.stderr


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [("raise", "failed", 1), ("exit_3", "failed", 3), ("exit_text", "failed", 1), ("memory", "out_of_memory", 7)],
)
def test_a_script_that_fails(tmp_path: Path, end: str, status: str, code: int) -> None:
    reference = (new_python if end == "raise" else python)(TRAIN, "--end", end)
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, "--end", end)
    assert completed.returncode == reference.returncode == code
    assert completed.stdout.startswith(reference.stdout)
    assert reference.stderr in completed.stderr  # the traceback as python prints it
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == (status, code)
    assert_reconciled(profile, tmp_path / "out")
    reports = sorted(path.name for path in (tmp_path / "out").glob("oom_report.*"))
    assert reports == (["oom_report.html", "oom_report.json", "oom_report.txt"] if end == "memory" else [])
    assert completed.stderr.count("OUT OF MEMORY in ") == (1 if end == "memory" else 0)


def test_a_script_that_leaves_by_os_exit(tmp_path: Path) -> None:
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, "--end", "os_exit")
    assert completed.returncode == 5
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("failed", 5)
    assert_reconciled(profile, tmp_path / "out")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_leave_the_profile_alone(tmp_path: Path, context: str) -> None:
    reference = plain(TRAIN, "--workers", "1", "--context", "fork")
    start = new_python if context == "spawn" else python
    completed = start(*RUN, "-o", tmp_path / "out", TRAIN, "--workers", "1", "--context", context)
    assert completed.returncode == 0, completed.stderr
    assert losses(completed.stdout) == losses(reference.stdout)
    assert completed.stderr.count("the profile is in") == 1
    assert_reconciled(profile_of(tmp_path / "out"), tmp_path / "out")


def test_the_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    script = str(SCRIPTS / "package" / "__main__.py")
    reference = new_python(script, "-o", "x", "--", "-m", cwd=tmp_path)
    completed = new_python(*RUN, "-o", tmp_path / "out", script, "-o", "x", "--", "-m", cwd=tmp_path)
    assert "threads 2" in reference.stdout  # set by the script, before it imports torch
    assert completed.stdout.startswith(reference.stdout)


def test_a_module_sees_what_python_shows_it(tmp_path: Path) -> None:
    reference = new_python("-m", "package", "-o", "x", "-m", cwd=SCRIPTS)
    completed = new_python(*RUN, "-o", tmp_path / "out", "-m", "package", "-o", "x", "-m", cwd=SCRIPTS)
    assert "name __main__ package" in reference.stdout
    assert completed.stdout.startswith(reference.stdout)


def test_a_script_without_opacus(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain.py")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    assert len(losses(completed.stdout)) == 3
    assert completed.stdout.startswith(plain(script).stdout)
    profile = profile_of(tmp_path / "out")
    assert_reconciled(profile, tmp_path / "out")
    assert not profile["warnings"]
    model, critic = (64 * 32 + 32 + 32 * 8 + 8) * 4, (8 * 16 + 16 + 16 + 1) * 4
    end = profile["devices"]["cpu"]["snapshots"][-1]["categories"]
    assert end["model_parameters"] == model + critic
    assert end["optimizer_states"] == model + 2 * critic + 4 * 4  # momentum, and Adam's with a count for each parameter
    assert 0 <= end["unattributed"] - 2 * model < 64  # the copy and its gradients, for nobody trains it
    modules = profile["devices"]["cpu"]["peak"]["modules"]
    assert modules["0"]["model_parameters"] == (64 * 32 + 32) * 4
    assert modules["Sequential#2.2"]["model_parameters"] == (16 + 1) * 4


_OTHERS = {  # the module, class and update of optimizers that are not torch's, and a state of theirs
    "keras": ("keras.src.backend.torch.optimizers.torch_optimizer", "TorchOptimizer", "apply", "variables[0].value"),
    "fastai": ("fastai.optimizer", "Optimizer", "step", "state[0]['average']"),
}


@pytest.mark.parametrize("framework", _OTHERS)
def test_an_optimizer_that_is_not_torchs(tmp_path: Path, framework: str) -> None:
    """A stand-in for the framework's class, with its names."""
    name, cls, update, state = _OTHERS[framework]
    module = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text(
        f"class {cls}:\n"
        f"    def {update}(self, weight):\n"
        "        change = weight.grad * 0.1\n"
        f"        self.{state} += change\n"
        "        weight.data -= change\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import types, torch\n"
        f"from {name} import {cls}\n"
        "model = torch.nn.Linear(500, 1000, bias=False)\n"
        f"optimizer = {cls}()\n"
        "value = torch.zeros(1000, 500)\n"
        "optimizer.variables, optimizer.state = [types.SimpleNamespace(value=value)], {0: {'average': value}}\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 500)).sum().backward()\n"
        f"    optimizer.{update}(model.weight)\n"
        "    model.zero_grad()\n"
    )
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    device = profile_of(tmp_path / "out")["devices"]["cpu"]
    weights = 500 * 1000 * 4
    assert [step["complete"] for step in device["steps"]].count(True) == 3
    assert device["peak"]["phase"] == "optimizer_step"
    for category in ("optimizer_states", "optimizer_temporaries", "gradients", "model_parameters"):
        assert weights <= device["peak"]["categories"][category] < weights + 100  # and torch's scalars
    assert device["peak"]["categories"].get("unattributed", 0) < 100


def test_unusual_training_without_opacus(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain_unusual.py")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(plain(script).stdout)
    assert ".grad attribute" not in completed.stderr
    profile = profile_of(tmp_path / "out")
    assert not profile["warnings"]
    kept = 2 * (64 * 32 + 32 + 32 * 8 + 8) * 4  # what the script still has: two models that Adam trains
    end = profile["devices"]["cpu"]["snapshots"][-1]["categories"]
    assert end["model_parameters"] == kept
    assert end["optimizer_states"] == 2 * kept + 2 * 4 * 4
    assert end.get("unattributed", 0) < 64


@pytest.mark.parametrize(
    ("mode", "order"), [("hooks", "before"), ("hooks", "after"), ("unwrapped", "before"), ("ghost", "after")]
)
def test_a_script_that_is_private_without_an_engine(tmp_path: Path, mode: str, order: str) -> None:
    script = str(SCRIPTS / "private_by_hand.py")
    completed = python(*RUN, "-o", tmp_path / "out", script, mode, order)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(plain(script, mode, order).stdout)
    profile = profile_of(tmp_path / "out")
    assert_reconciled(profile, tmp_path / "out")
    assert not profile["warnings"]
    batch, parameters = 16, 64 * 32 + 32 + 32 * 8 + 8
    device = profile["devices"]["cpu"]
    for categories in (device["phases"]["noise"]["categories"], device["steps"][-1]["categories"]):
        assert categories["optimizer_states"] == 2 * parameters * 4 + 4 * 4
        assert categories["summed_gradients"] == parameters * 4
        assert categories.get("per_sample_gradients", 0) == (0 if mode == "ghost" else batch * parameters * 4)
        assert categories.get("norm_samples", 0) == (batch * 4 * 4 if mode == "ghost" else 0)
        assert "unattributed" not in categories


def test_what_privacy_costs_a_script(tmp_path: Path) -> None:
    """Of the same training with Opacus and without: what both have alike is not in the difference."""
    for name in ("hooks", "vanilla"):
        completed = python(*RUN, "-o", tmp_path / name, TRAIN, "--mode", name)
        assert completed.returncode == 0, completed.stderr
    completed = python("-m", "opacus_memprof", "tax", tmp_path / "hooks", tmp_path / "vanilla")
    assert completed.returncode == 0, completed.stderr
    assert "per_sample_gradients" in completed.stdout
    for category in ("model_parameters", "optimizer_states", "unattributed", "activation_hooks "):
        assert category not in completed.stdout


def test_a_script_that_trains_nothing(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import torch\nprint(torch.nn.Linear(4, 4)(torch.ones(2, 4)).shape)\n")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    assert "no PrivacyEngine" in completed.stdout


def test_a_script_without_torch(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    completed = python(*RUN, "-o", tmp_path / "out", tmp_path / "hello.py")
    assert (completed.returncode, completed.stdout) == (0, "hello\n")
    assert "did not import torch" in completed.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_beyond_the_bound_keeps_its_peak_and_end(tmp_path: Path) -> None:
    completed = python(*RUN, "-o", tmp_path / "out", "--max-events", "50", TRAIN, "--steps", "12")
    assert completed.returncode == 0
    assert losses(completed.stdout) == losses(plain(TRAIN, "--steps", "12").stdout)
    whole = python(*RUN, "-o", tmp_path / "whole", TRAIN, "--steps", "12")
    assert whole.returncode == 0
    bounded, unbounded = profile_of(tmp_path / "out"), profile_of(tmp_path / "whole")
    assert unbounded["events"]["gaps"] == []
    gaps = bounded["events"]["gaps"]
    assert gaps
    assert bounded["events"]["dropped"] == sum(gap["events"] for gap in gaps) > 0
    assert bounded["events"]["recorded"] + bounded["events"]["dropped"] == unbounded["events"]["recorded"]
    assert "are not in the event files" in " ".join(bounded["warnings"])
    bounded_device, whole_device = (profile["devices"]["cpu"] for profile in (bounded, unbounded))
    for key in ("requested_bytes", "source", "step", "phase", "categories", "modules", "ops", "born_in", "event"):
        assert bounded_device["peak"][key] == whole_device["peak"][key], key
    steps = {step["step"]: step for step in whole_device["steps"]}
    assert bounded_device["steps"][-1]["step"] == whole_device["steps"][-1]["step"]
    for step in bounded_device["steps"]:
        for key in ("peak_bytes", "end_bytes", "categories", "phase", "event") if step["complete"] else ():
            assert step[key] == steps[step["step"]][key], key
    assert bounded_device["end_bytes"] == whole_device["end_bytes"]


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    command = f"{sys.executable} {' '.join(RUN)} -o {tmp_path / 'out'} {TRAIN} --end wait_a_little | head -n 3"
    shell = ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"]
    completed = subprocess.run(shell, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert completed.stdout.splitlines()[-1] == "0"
    assert completed.stderr == f"opacus-memprof: the profile is in {tmp_path / 'out'}\n"
    assert profile_of(tmp_path / "out")["exit_code"] == 0


ATTACHING = """
import torch
from torch import nn
from opacus_memprof import session

model, other = nn.Sequential(nn.Linear(8, 4)), nn.Linear(3, 3)
session.current().attach(other)
from opacus import PrivacyEngine
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 8)), batch_size=3)
model, optimizer, data = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False
)
for (x,) in data:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_script_that_attaches_before_it_imports_opacus(tmp_path: Path) -> None:
    """`run` follows PrivacyEngine as soon as Opacus is imported, which is then in the middle of `attach`."""
    (tmp_path / "script.py").write_text(ATTACHING)
    completed = python(*RUN, "-o", tmp_path / "out", tmp_path / "script.py")
    assert completed.returncode == 0, completed.stderr
    profile = profile_of(tmp_path / "out")
    assert not profile["warnings"]
    assert profile["devices"]["cpu"]["peak"]["modules"]["0"]["per_sample_gradients"] > 0
