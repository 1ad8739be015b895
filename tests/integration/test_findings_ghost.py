# SPDX-License-Identifier: Apache-2.0
"""What ghost clipping costs and misses, planted in trainings on the CPU and found with its bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.planted_findings import BATCH, FLOAT, Training, kinds, of_kind, profiled

pytestmark = pytest.mark.usefixtures("clean_process")


class Sequence(nn.Module):
    """One Linear over tokens, with an in-place change of shape before it."""

    def __init__(self, d: int = 3, p: int = 5, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(d, p, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("bias", "matrices"), [(True, 3), (False, 2)])
def test_matrices_of_tokens_by_tokens(tmp_path: Path, bias: bool, matrices: int) -> None:
    tokens = 40

    def run(session: Any) -> None:
        training = Training(Sequence(bias=bias), "ghost")
        training.step(torch.randn(BATCH, tokens, 3))

    profile = profiled(tmp_path, run)
    (found,) = of_kind(profile, "ghost_matrices")
    assert found["module"] == "layer"
    assert found["bytes"] == matrices * FLOAT * BATCH * tokens**2
    assert found["gradient_bytes"] == FLOAT * BATCH * (5 * 3 + 5 * bias)
    # They are the peak, and the replay of the events has as many.
    assert profile["devices"]["cpu"]["peak"]["modules"]["layer"]["temp_matrices"] >= found["bytes"]
    assert "flash_clip" in found["remedy"]


def test_matrices_of_many_layers_are_one_finding(tmp_path: Path) -> None:
    tokens = 40

    def run(session: Any) -> None:
        model = nn.Sequential(Sequence(3, 5), Sequence(5, 4, bias=False), Sequence(4, 3))
        Training(model, "ghost").step(torch.randn(BATCH, tokens, 3))

    (found,) = of_kind(profiled(tmp_path, run), "ghost_matrices")
    matrix = FLOAT * BATCH * tokens**2
    assert found["module"] == ""
    assert found["modules"] == {"0.layer": 3 * matrix, "1.layer": 2 * matrix, "2.layer": 3 * matrix}
    assert found["bytes"] == 3 * matrix  # of the largest, since they do not live together
    assert "2 more layers" in found["evidence"]


def test_matrices_that_are_worth_it(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Sequence(30, 40), "ghost").step(torch.randn(BATCH, 10, 30))

    assert not {"ghost_matrices", "stale_norm_samples"} & kinds(profiled(tmp_path, run))


def test_norms_that_are_stale(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        training = Training(Sequence(), "ghost")
        training.step(torch.randn(BATCH, 6, 3))
        training.step(torch.randn(BATCH, 2, 3, 3))

    (found,) = of_kind(profiled(tmp_path, run), "stale_norm_samples")
    assert found["module"] == "layer"
    assert found["bytes"] == 2 * BATCH * FLOAT  # weight and bias
    assert "4 dimensions" in found["evidence"]
    assert "those of an earlier batch" in found["evidence"]


def test_norms_that_are_missing(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Sequence(), "ghost").step(torch.randn(BATCH, 2, 3, 3))

    profile = profiled(tmp_path, run, AttributeError)
    (found,) = of_kind(profile, "stale_norm_samples")
    assert found["bytes"] == 0
    assert "clipping fails" in found["evidence"]
