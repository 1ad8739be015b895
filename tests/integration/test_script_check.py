# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof doctor --script` says whether a script's mode clips its model exactly, and ends it there."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import ENVIRONMENT, interpreter

SCRIPT = """
import sys
import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, permuted):
        super().__init__()
        self.norm, self.conv, self.head = nn.LayerNorm(3), nn.Conv2d(3, 4, 2, stride=2), nn.Linear(16, 2)
        self.permuted = permuted

    def forward(self, x, scale=1.0):
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.conv(x if self.permuted else x.contiguous()).flatten(1)) * scale


mode, permuted, raises, trains = sys.argv[1], "--permuted" in sys.argv, "--raises" in sys.argv, "--trains" in sys.argv
model = Net(permuted)
data = DataLoader(TensorDataset(torch.randn(16, 3, 4, 4), torch.randint(0, 2, (16,))), batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
if raises:
    raise ValueError("the data are gone")
options = {"criterion": criterion} if mode == "ghost" else {}
prepared = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0,
    poisson_sampling=False, grad_sample_mode=mode, **options,
)
model, loader = prepared[0], prepared[-1]
model.eval()
model(torch.randn(2, 3, 4, 4))  # an evaluation before is not the training's first batch
model.train()
if trains:
    for x, y in loader:
        try:
            model(x, scale=2.0)
        except Exception:
            pass
        print("trained a batch")
"""


def doctor(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*interpreter(), "-m", "opacus_memprof", "doctor", "--script", "train.py", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["ghost"], 0), (["functorch", "--permuted"], 0), (["hooks", "--permuted"], 3)],
)
def test_the_verdict_is_that_of_the_mode(tmp_path: Path, arguments: list[str], code: int) -> None:
    """Opacus' sampler for an unpadded convolution of a permuted view is wrong, in hooks and ghost."""
    ran = doctor(tmp_path, *arguments, "--trains")
    assert ran.returncode == code, ran.stderr
    assert "trained a batch" not in ran.stdout
    deviations = {
        name: float(size) for size, name in re.findall(r"^ *(\d\.\de[+-]\d\d)  (\S+)", ran.stdout, re.MULTILINE)
    }
    parameters = {f"{layer}.{name}" for layer in ("norm", "conv", "head") for name in ("weight", "bias")}
    assert deviations.keys() == parameters | {"the"}  # the samples' norms
    if code:
        assert deviations["conv.weight"] > 0.01
        assert f"grad_sample_mode='{arguments[0]}' does not clip this model exactly" in ran.stdout
        assert "Exact for this model and batch: flash_clip, functorch." in ran.stdout
    else:
        assert max(deviations.values()) <= 1e-8
        assert f"grad_sample_mode='{arguments[0]}' clips this model exactly: 4 samples, 6 parameters" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["hooks", "--raises"],
            "train.py ended with ValueError in line 31 (the data are gone) before it called "
            "PrivacyEngine.make_private: there is nothing to check.",
        ),
        (["hooks"], "train.py ended before it called its private model with a batch: there is nothing to check."),
        (["no_op", "--trains"], "mode is 'no_op'; verify knows flash_clip, hooks, functorch, ew, ghost."),
    ],
)
def test_what_cannot_be_checked(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    ran = doctor(tmp_path, *arguments)
    assert (ran.returncode, ran.stderr.strip()) == (2, f"opacus-memprof: {sentence}")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    command = [*interpreter(), "-m", "opacus_memprof", "doctor"]
    for arguments, sentence in (
        (["--script", "nowhere.py"], "the script nowhere.py does not exist"),
        (["--script"], "to check how a script clips: opacus-memprof doctor --script SCRIPT.py [ARGS]"),
    ):
        ran = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
        assert (ran.returncode, ran.stderr.strip()) == (2, f"opacus-memprof: {sentence}")
