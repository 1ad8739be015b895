# SPDX-License-Identifier: Apache-2.0
"""The largest of many drawn batches, against simulated trainings and sums by hand."""

import math
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram
from opacus_memprof.planning.draws import LargestBatch, _physical_batch


def test_a_thousand_simulated_trainings() -> None:
    samples, rate, steps, trainings = 5000, 0.02, 200, 1000
    generator = torch.Generator().manual_seed(0)
    probability = torch.full((trainings, steps), rate)
    drawn = torch.binomial(torch.full((trainings, steps), float(samples)), probability, generator=generator)
    highest = drawn.max(dim=1).values
    largest = LargestBatch(samples, rate, steps)
    for size in range(115, 145):
        simulated = (highest > size).double().mean().item()
        expected = largest.probability_above(size)
        assert abs(simulated - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / trainings) + 1e-9, size
    for wanted in (0.1, 0.5, 0.9):
        size = largest.quantile(wanted)
        assert (highest <= size).double().mean().item() >= wanted - 0.07
        assert (highest < size).double().mean().item() <= wanted + 0.07


def test_small_cases_by_hand() -> None:
    largest = LargestBatch(3, 0.25, 2)
    at_most = [Fraction(27, 64), Fraction(54, 64), Fraction(63, 64), Fraction(1)]  # of one batch: 0, 1, 2, 3
    for size, probability in enumerate(at_most):
        assert largest.probability_above(size) == pytest.approx(float(1 - probability**2))
    assert largest.probability_above(-1) == 1
    assert [largest.quantile(wanted) for wanted in (0.1, 0.5, 0.95, 0.999)] == [0, 1, 2, 3]


def test_small_probabilities_keep_their_digits() -> None:
    """One sample in each of 40 draws: all of them with probability 2^-40."""
    assert LargestBatch(40, 0.5, 1000).probability_above(39) == pytest.approx(1000 * 2.0**-40, rel=1e-6)


def test_full_batches_are_certain() -> None:
    largest = LargestBatch(64, 1.0, 10)
    assert (largest.probability_above(63), largest.probability_above(64), largest.quantile(0.999)) == (1.0, 0.0, 64)


def test_a_logical_batch_is_tried_in_all_its_parts() -> None:
    """The largest part that fits, of sizes that all hold the largest batch that is likely, in two parts at least."""
    tried: list[tuple[int, int]] = []

    def run_all(configurations: Sequence[PlannedConfiguration]) -> list[SimpleNamespace]:
        tried.extend((each.changes[0]["value"], each.changes[1]["value"]) for each in configurations)
        return [SimpleNamespace(fits=each.changes[1]["value"] <= 70) for each in configurations]

    configuration = PlannedConfiguration(PlannedProgram("train.py"), "t4")
    runs: Any = SimpleNamespace(all=run_all)
    physical, _ = _physical_batch(runs, configuration, fits=100, most=250, samples=1000, on_round=lambda count: None)
    assert physical == 70
    assert [size for _, size in tried] == [100, 85, 70, 50]
    assert all(drawn >= max(250, 2 * size) for drawn, size in tried)
