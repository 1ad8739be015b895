# SPDX-License-Identifier: Apache-2.0
"""What an out-of-memory report predicts for a mode is what a run in that mode takes.

Models of many kinds run out of memory in the mode hooks, on a virtual GPU, which counts memory as a real one does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.estimated_models import MODELS
from tests.warm_python import ENVIRONMENT, interpreter

SCRIPT = Path(__file__).parent / "scripts" / "compare_estimates.py"
MOST_BELOW, MOST_ABOVE = 0.03, 0.10
# Where the model of a step misses.
WRONG = {
    ("LSTM in both directions", "ghost"): "predicted 14 % above 163 MiB",
}

# Models of whose layers, types and modes another model of the list has each. Of these, each once in a night.
NIGHTLY = {
    *("narrow deep MLP", "MLP in bfloat16", "MLP of short sequences", "transformer, short", "transformer in bfloat16"),
    *("Llama", "one label for each text", "large vocabulary in bfloat16", "tied layers", "LoRA in bfloat16"),
    *("LoRA in attention, frozen head", "convolutions", "wide convolutions", "strided convolutions", "LSTM"),
    *("convolutions in one dimension", "depthwise convolutions", "GRU of two layers", "RNN", "U-Net"),
}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
)
Rows = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    """By model: its peaks by mode, and the modes' by change; each the predicted one and the one that a run had.

    Of the models that tests of this session are of.
    """
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params.get("model", CHANGED) for item in here if hasattr(item, "callspec")}
    command = [*interpreter(), str(SCRIPT), *(model for model in MODELS if model in asked)]
    completed = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=1200)
    assert completed.returncode == 0, completed.stderr[-2000:]
    found = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    return {row["model"]: row for row in found}


def _case(model: str, mode: str) -> object:
    wrong = WRONG.get((model, mode))
    marks = [pytest.mark.xfail(reason=wrong, strict=True)] if wrong else []
    marks += [pytest.mark.nightly] if model in NIGHTLY else []
    return pytest.param(model, mode, id=f"{model}, {mode}", marks=marks)


@pytest.mark.parametrize(("model", "mode"), [_case(model, mode) for model in MODELS for mode in MODELS[model].modes])
def test_a_mode_takes_what_is_predicted(model: str, mode: str, rows: Rows) -> None:
    predicted, actual = rows[model]["peaks"][mode]
    assert (1 - MOST_BELOW) * actual <= predicted <= (1 + MOST_ABOVE) * actual


def test_there_are_thirty_models() -> None:
    assert len(MODELS) >= 30
    assert MODELS.keys() > NIGHTLY


CHANGED = "transformer, long"
CHANGES = ("checkpoint", "fused_attention", "optimizer", "dtype", "lora", "sequence_length")
MODES = ("hooks", "flash_clip")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_training_takes_what_is_predicted(change: str, mode: str, rows: Rows) -> None:
    predicted, actual = rows[CHANGED]["changes"][mode][change]
    assert (1 - MOST_BELOW) * actual <= predicted <= (1 + MOST_ABOVE) * actual
