# SPDX-License-Identifier: Apache-2.0
"""A profiled run computes the same: losses and parameters are bit-identical, in every mode, and so is the peak."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from tests import models
from tests.models import MODELS, MODES, Model


def train(model: Model, mode: str, device: str, engine: PrivacyEngine) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and final parameters of three steps with batches of different sizes."""
    training = models.prepare(model, mode, device, engine)
    losses = [training.step(n) for n in (6, 3, 5)]
    return losses, [p.detach().clone() for p in training.module.parameters()]


def assert_bit_identical(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(tensors) == len(others) > 0
    for tensor, other in zip(tensors, others, strict=True):
        assert tensor.dtype == other.dtype
        # Compared as bytes: NaN would differ from itself, and -0.0 would equal 0.0.
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Makes CUDA's sums deterministic: some kernels add up in a random order.

    With ghost clipping, a third of gpt2's runs differ from the first, with the profiler and without.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.true_numbers])])
@pytest.mark.usefixtures("deterministic")
def test_profiled_run_is_bit_identical(model: Model, mode: str, device: str, tmp_path: Path) -> None:
    losses, parameters = train(model, mode, device, PrivacyEngine())
    with opacus_memprof.profile(tmp_path / "profile", device=device) as session:
        engine = PrivacyEngine()
        session.attach(engine)
        profiled_losses, profiled_parameters = train(model, mode, device, engine)

    assert_bit_identical([loss.reshape(1) for loss in losses], [loss.reshape(1) for loss in profiled_losses])
    assert_bit_identical(parameters, profiled_parameters)
    assert not torch.equal(losses[0], losses[1])  # it did train


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_profiled_run_has_the_same_peak(model: Model, mode: str, tmp_path: Path) -> None:
    def peak(engine: PrivacyEngine) -> int:
        gc.collect()  # cycles of an earlier run must not die in the midst of this one
        gc.disable()
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            # In this thread: one of autograd's own lets go of the last node's buffers when it gets round to it, which
            # on a busy machine is often too late.
            with torch.autograd.set_multithreading_enabled(False):
                train(model, mode, "cuda", engine)
            return torch.cuda.max_memory_allocated() - before
        finally:
            gc.enable()

    peak(PrivacyEngine())  # libraries take their workspaces
    alone = peak(PrivacyEngine())
    with opacus_memprof.profile(tmp_path / "profile", device="cuda") as session:
        engine = PrivacyEngine()
        session.attach(engine)
        profiled = peak(engine)
    assert profiled == alone


def test_losses_die_when_the_program_lets_go(tmp_path: Path) -> None:
    engine, model = PrivacyEngine(), torch.nn.Linear(3, 2)
    with opacus_memprof.profile(tmp_path / "profile", device="cpu") as session:
        session.attach(engine)
        model, optimizer, _ = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        gc.disable()  # as in the middle of any run, in which a cycle would keep them
        try:
            for _ in range(3):
                loss = model(torch.randn(4, 3)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                lost = weakref.ref(loss)
                del loss
                assert lost() is None
        finally:
            gc.enable()


def test_only_the_largest_forwards_are_probed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with opacus_memprof.profile(tmp_path / "profile", device="cpu") as session:
        session.attach(model)
        before = [len(module._forward_hooks) for module in model]
        model(torch.zeros(5, 3))
        assert [len(module._forward_hooks) for module in model] == before
