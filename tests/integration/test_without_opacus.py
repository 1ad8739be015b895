# SPDX-License-Identifier: Apache-2.0
"""Plain programs are profiled, planned and reported where Opacus is not installed, and nothing imports it for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opacus_memprof.analysis.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]

REFUSE = """
import sys

class WithoutOpacus:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opacus":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutOpacus())
"""
PROGRAM = """
import sys, torch

device = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters())
# follow
for _ in range(3):
    inputs, targets = torch.randn(16, 64, device=device), torch.zeros(16, 4, device=device)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
assert not any(name.partition(".")[0] == "opacus" for name in sys.modules)
"""
BEGIN = """
import opacus_memprof

session = opacus_memprof.profile("profile", device="cpu")
session.start()
"""
ATTACHED = f"{BEGIN}{PROGRAM.replace('# follow', 'session.attach(model, optimizer)')}session.close()"
PARAMETERS = 4 * (64 * 32 + 32 + 32 * 4 + 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs, whose processes have no Opacus."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "sitecustomize.py").write_text(REFUSE)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "attached.py").write_text(ATTACHED)
    return tmp_path


def python(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "startup"), str(ROOT)])}
    ran = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout


@pytest.mark.parametrize(
    "command",
    [("-m", "opacus_memprof", "run", "-o", "profile", "--device", "cpu", "train.py", "cpu"), ("attached.py", "cpu")],
)
def test_a_plain_program_is_profiled(folder: Path, command: tuple[str, ...]) -> None:
    python(folder, *command)
    profile = load_profile(folder / "profile")
    categories = profile.devices["cpu"].peak.categories
    assert profile.warnings == []
    assert categories["model_parameters"] == PARAMETERS
    assert categories["optimizer_states"] == 2 * PARAMETERS + 4 * 4  # two moments, and a step count for each parameter
    assert categories["unattributed"] == 0
    assert "every byte accounted for" in python(folder, "-m", "opacus_memprof", "report", "profile")


def test_a_plain_program_is_planned(folder: Path) -> None:
    shown = python(folder, "-m", "opacus_memprof", "plan", "--gpu", "h200", "-o", "plan", "train.py", "cuda")
    assert "fits" in shown
    assert load_profile(folder / "plan").devices["cuda:0"].peak.categories["model_parameters"] == PARAMETERS
