# SPDX-License-Identifier: Apache-2.0
"""The operations of a forward, and their numbers, are recognized."""

import functools
import pickle
from collections.abc import Callable

import pytest
import torch

from opacus_memprof.clipping.kernels.native import OperationLog

X = torch.randn(4, 6)
Forward = Callable[[], object]


def is_new(log: OperationLog, forward: Forward, is_ordered: bool = True) -> bool:
    log.begin()
    try:
        forward()
    finally:
        found = log.end(is_ordered)
    return found


def log_of(*forwards: Forward) -> OperationLog:
    log = OperationLog()
    for forward in forwards:
        is_new(log, forward)
        log.learn()
    return log


def test_the_same_operations_are_known() -> None:
    log = log_of(lambda: (2.0 * X).tanh())
    assert not is_new(log, lambda: (2.0 * X).tanh())
    larger = torch.randn(9, 3)
    assert not is_new(log, lambda: (2.0 * larger).tanh())


def test_operations_are_known_from_any_depth_of_calls() -> None:
    """torch records "detach" under a string on the stack, which is elsewhere below a tracer, or a function in C."""
    log = log_of(lambda: X.detach().tanh())
    assert not is_new(log, lambda: functools.reduce(lambda x, _: x.detach().tanh(), [0], X))


@pytest.mark.parametrize(
    "other",
    [
        lambda: (3.0 * X).softmax(1) + torch.tensor(1.0),
        lambda: (2.0 * X).softmax(0) + torch.tensor(1.0),
        lambda: (2.0 * X).softmax(1) + torch.tensor(5.0),
        lambda: (2.0 * X).softmax(1) - torch.tensor(1.0),
        lambda: (2.0 * X).softmax(1) + torch.tensor(1.0) + X.mean(0),
    ],
    ids=["factor", "dimension", "tensor of a number", "operation", "further operation"],
)
def test_a_change_is_new_once(other: Forward) -> None:
    log = log_of(lambda: (2.0 * X).softmax(1) + torch.tensor(1.0))
    assert is_new(log, other)
    log.learn()
    assert not is_new(log, other)


def test_lengths_are_not_numbers() -> None:
    def forward(length: int) -> torch.Tensor:
        x = torch.ones(2, length, 3)
        return (x + torch.arange(length).view(1, length, 1))[:, : length - 1].reshape(2 * (length - 1), 3)

    log = log_of(lambda: forward(20))
    assert not is_new(log, lambda: forward(31))


def test_a_loop_may_be_longer() -> None:
    def loop(count: int) -> None:
        x = X
        for _ in range(count):
            x = (0.5 * x).tanh()

    log = log_of(lambda: loop(4))
    assert not is_new(log, lambda: loop(7), is_ordered=False)


def test_numbers_that_change_places_are_new_in_order_only() -> None:
    log = log_of(lambda: [X * 1.0, X * 2.0, X * 3.0, X * 4.0])
    swapped: Forward = lambda: [X * 1.0, X * 2.0, X * 4.0, X * 3.0]  # noqa: E731
    assert is_new(log, swapped)
    assert not is_new(log, swapped, is_ordered=False)


def test_a_number_that_changes_often_is_left_out() -> None:
    log = log_of(*(lambda n=n: X * float(n) for n in range(10)))  # type: ignore[misc]
    assert not is_new(log, lambda: X * 99.0)
    assert is_new(log, lambda: X + 99.0)


def test_an_error_ends_the_record() -> None:
    broken, log = OperationLog(), log_of(lambda: X * 2.0)
    broken.begin()  # and its forward raised an error
    assert is_new(log, lambda: X * 3.0)
    assert not broken.end(True)


def test_a_copy_knows_nothing() -> None:
    log = log_of(lambda: X * 2.0)
    assert is_new(pickle.loads(pickle.dumps(log)), lambda: X * 2.0)
