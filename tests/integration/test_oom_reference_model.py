# SPDX-License-Identifier: Apache-2.0
"""What an out-of-memory report predicts where a reference model, which no optimizer trains, records graphs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.warm_python import ENVIRONMENT, interpreter

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
)
PREFERENCES = Path(__file__).parent / "scripts" / "train_preferences.py"


def _trained_by_preferences(output: Path, mode: str, *options: str) -> Path:
    command = ["-m", "opacus_memprof", "run", "--virtual-gpu", "h200", *options, "-o", str(output), str(PREFERENCES)]
    subprocess.run([*interpreter(), *command, mode], capture_output=True, env=ENVIRONMENT, timeout=300)
    return output


def test_gradients_of_a_reference_model_are_predicted(tmp_path: Path) -> None:
    """No optimizer trains it, and no zero_grad clears its gradients, which are as large as the model."""
    failed = _trained_by_preferences(tmp_path / "failed", "hooks", "--virtual-memory", "1GiB")
    report = json.loads((failed / "oom_report.json").read_text())
    assert report["request"]["step"] == 0
    predicted = {
        action["value"]: suggestion["predicted_peak_bytes"]
        for suggestion in report["suggestions"]
        if [action["kind"] for action in suggestion["actions"]] == ["grad_sample_mode"]
        for action in suggestion["actions"]
    }
    predicted["hooks"] = report["needed"]["bytes"]
    for mode in ("hooks", "flash_clip"):
        output = _trained_by_preferences(tmp_path / mode, mode)
        profile = json.loads((output / "profile.json").read_text())
        actual = profile["devices"]["cuda:0"]["peak"]["requested_bytes"]
        assert 0.97 * actual <= predicted[mode] <= 1.1 * actual, mode
