# SPDX-License-Identifier: Apache-2.0
"""Activations that Opacus has captured and nothing uses, planted in trainings on the CPU and found with their bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opacus_memprof.clipping import adopt_grad_samples
from tests.integration.planted_findings import (
    BATCH,
    FLOAT,
    Training,
    drop_gradients,
    kinds,
    mlp,
    of_kind,
    profiled,
)

pytestmark = pytest.mark.usefixtures("clean_process")


def test_forwards_without_backward(tmp_path: Path) -> None:
    """Twelve batches evaluated in train mode with gradients on.

    Each forward leaves the first ReLU's output, which the second Linear captured; the batch itself, which the first one
    captured, counts as inputs.
    """

    def run(session: Any) -> None:
        training = Training(mlp())
        for _ in range(12):
            training.model(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run)
    (found,) = of_kind(profile, "captures_without_backward")
    looked_at = found["captures"]["2"]
    assert 2 <= looked_at <= 12
    assert found["captures"] == {"0": looked_at, "2": looked_at}
    assert found["bytes"] == looked_at * BATCH * 16 * FLOAT
    assert found["modules"] == {"1": found["bytes"]}  # who made them
    assert found["module"] == ""
    assert "torch.no_grad()" in found["remedy"]
    assert "checkpoint_captures" not in kinds(profile)


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("hooks", ValueError, "the step failed"),
        ("ghost", NotImplementedError, "tied"),  # Opacus refuses the next forward, and speaks of tied parameters
    ],
)
def test_one_stray_forward_makes_the_next_step_fail(
    mode: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    def run(session: Any) -> None:
        training = Training(mlp(), mode)
        training.model(torch.randn(BATCH, 8))
        training.step(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run, error)
    (found,) = of_kind(profile, "captures_without_backward")
    assert found["captures"] == {"0": 1, "2": 1}
    assert found["bytes"] == BATCH * 16 * FLOAT
    assert words in found["evidence"]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_program_that_ends_among_the_forwards_of_a_batch(before: int, tmp_path: Path) -> None:
    """Six forwards share each backward, but for the second; after the first step this is known to be no defect.

    Before it, a third forward may still be one of them.
    """

    def run(session: Any) -> None:
        training = Training(mlp())
        for step in range(before + 1):
            count = 3 if before == 0 else 2 if step == 1 < before else 6
            losses = [training.model(torch.randn(BATCH, 8)).square().mean() for _ in range(count)]
            if step == before:
                raise KeyError
            torch.stack(losses).sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert "captures_without_backward" not in kinds(profiled(tmp_path, run, KeyError))


def test_more_forwards_than_ever_met_a_backward(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        training = Training(mlp())
        training.step(torch.randn(BATCH, 8))
        for _ in range(12):
            training.model(torch.randn(BATCH, 8))

    assert "captures_without_backward" in kinds(profiled(tmp_path, run))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block, self.reentrant = nn.Linear(8, 8), mlp(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def test_checkpointing_that_leaks_captures(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Checkpointed(reentrant=False)).step(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run, ValueError)
    (found,) = of_kind(profile, "checkpoint_captures")
    # The repetition stops once it has what the backward needs: the block's last module captures once, the first twice.
    assert found["captures"] == {"block.0": 1}
    assert found["bytes"] == BATCH * 8 * FLOAT  # its input
    assert found["modules"] == {"stem": found["bytes"]}
    assert found["module"] == "block.0"
    assert "use_reentrant=True" in found["remedy"]


def test_checkpointing_under_ghost_clipping(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Checkpointed(reentrant=False), "ghost").step(torch.randn(BATCH, 8))

    (found,) = of_kind(profiled(tmp_path, run, NotImplementedError), "checkpoint_captures")
    assert "use_reentrant=True" in found["remedy"]


@pytest.mark.parametrize("steps", [1, 5])
def test_checkpointing_that_works(tmp_path: Path, steps: int) -> None:
    def run(session: Any) -> None:
        training = Training(Checkpointed(reentrant=True))
        drop_gradients(training)
        for _ in range(steps):
            training.step(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run)
    assert not {"checkpoint_captures", "captures_without_backward"} & kinds(profile)


def test_forwards_that_share_a_backward_are_none(tmp_path: Path) -> None:
    """Four forwards, one backward through all of them, in each step."""

    def run(session: Any) -> None:
        training = Training(mlp())
        for _ in range(3):
            outputs = [training.model(torch.randn(BATCH, 8)) for _ in range(4)]
            torch.stack(outputs).mean().backward()
            training.optimizer.zero_grad()

    assert not of_kind(profiled(tmp_path, run), "captures_without_backward")


def test_an_earlier_session_leaves_nothing(tmp_path: Path) -> None:
    """Its captures are no findings of the next session.

    What is kept of it, 4 MiB beside a training of 50 KiB, hides none.
    """
    kept = []

    def leaky(session: Any) -> None:
        kept.append(torch.zeros(2**20))
        training = Training(mlp())
        for _ in range(5):
            training.model(torch.randn(BATCH, 8))

    assert of_kind(profiled(tmp_path / "leaky", leaky), "captures_without_backward")

    def clean(session: Any) -> None:
        training = Training(mlp())
        drop_gradients(training)
        for _ in range(4):
            training.step(torch.randn(32, 8))

    assert kinds(profiled(tmp_path / "copying", clean)) == {"copied_per_sample_gradients"}
    restore = adopt_grad_samples()
    try:
        assert profiled(tmp_path / "clean", clean)["findings"] == []
    finally:
        restore()
