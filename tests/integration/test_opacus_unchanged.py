# SPDX-License-Identifier: Apache-2.0
"""A profiled run is the same run: losses and parameters to the bit, every allocation, and what keeps memory alive."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile, record_function

from tests.integration.opacus_training import MODES, Training, attached, cpu, prepare  # noqa: F401
from tests.oracle.meter import WINDOW, no_collection, window_peaks

# Opacus warns of first layers whose input needs no gradient, functorch of float64 under autocast.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:In CPU autocast")


def outcome(training: Training) -> list[torch.Tensor]:
    """Losses, then the trained parameters and the optimizer's states."""
    losses = torch.tensor(training.run(), dtype=torch.float64)
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    return [losses, *(p.detach().clone() for p in training.model.parameters()), *states]


def assert_identical(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right) > 1
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_parameters_are_bit_identical(mode: str, cpu: None) -> None:  # noqa: F811
    plain = outcome(prepare(mode))

    training = prepare(mode)
    with attached(training):
        profiled = outcome(training)

    assert_identical(plain, profiled)


@pytest.mark.parametrize("mode", MODES)
def test_allocations_are_the_same(mode: str) -> None:
    def allocations(training: Training) -> tuple[Counter[int], dict[str, int]]:
        training.run()  # lazy states
        gc.collect()
        with no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            training.run()
        # In an order that clock ticks leave open. Frees are not told reliably: see `window_peaks`.
        sizes = (event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
        allocated = Counter(size for size in sizes if size > 0)

        def epoch() -> None:
            with record_function(f"{WINDOW}epoch"):
                training.run()

        return allocated, window_peaks(epoch)

    plain = allocations(prepare(mode))

    training = prepare(mode)
    with attached(training):
        profiled = allocations(training)

    assert profiled == plain
    assert plain[0].total() > 250
    assert plain[1]["epoch"] > 0


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_storages_have_the_same_holders(mode: str, cpu: None) -> None:  # noqa: F811
    def holders(training: Training) -> list[int]:
        tokens, labels = next(iter(training.loader))
        loss = training.criterion(training.model(tokens), labels)
        counts = [
            torch._C._storage_Use_Count(activation.untyped_storage()._cdata)
            for module in training.model.modules()
            for captured in vars(module).get("activations", ())
            for activation in captured
        ]
        loss.backward()
        for p in training.model.parameters():
            for tensor in (p.grad, p.grad_sample):
                if tensor is not None:
                    counts.append(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
        return counts

    plain = holders(prepare(mode))

    training = prepare(mode)
    with attached(training):
        profiled = holders(training)

    assert profiled == plain
    assert len(plain) > 4


@pytest.mark.parametrize("mode", ["vanilla", "hooks", "ghost"])
def test_dropped_optimizer_is_freed_at_once(mode: str) -> None:
    training = prepare(mode)
    with attached(training), no_collection():
        training.run()
        references = [weakref.ref(training.optimizer)]
        if mode != "vanilla":
            references.append(weakref.ref(training.optimizer.original_optimizer))

        training.optimizer = training.criterion = None

        assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("mode", MODES)
def test_dropped_model_is_freed(mode: str) -> None:
    training = prepare(mode)
    with attached(training):
        training.run()
        references: list[weakref.ref[Any]] = [weakref.ref(training.model)]
        references += [weakref.ref(p) for p in training.model.parameters()]

        training.model = training.returned = training.optimizer = training.criterion = None
        gc.collect()  # Opacus' hooks hold the model that they hang on

        assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("mode", ["vanilla", "hooks", "ghost"])
def test_learning_rate_scheduler(mode: str, attach_first: bool) -> None:
    def train(training: Training, scheduler: StepLR) -> list[float]:
        losses = []
        for tokens, labels in training.loader:
            losses.append(training.step(tokens, labels))
            scheduler.step()
        assert training.optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**4
        return losses

    plain = prepare(mode)
    expected = train(plain, StepLR(plain.optimizer, 1, 0.5))

    training = prepare(mode)
    scheduler = None if attach_first else StepLR(training.optimizer, 1, 0.5)
    with attached(training):
        assert train(training, scheduler or StepLR(training.optimizer, 1, 0.5)) == expected
    training.run()  # the scheduler's patch of `step` outlives the attachment
