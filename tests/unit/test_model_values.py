# SPDX-License-Identifier: Apache-2.0
"""What counts as a change of a model between two forwards."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from opacus_memprof.clipping.proof.model_state import ModelState, Tokens, only_saved_tensors_hooks


class Counted(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(size, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def forwards(model: nn.Module, change: Callable[[], Any], count: int = 12) -> list[Any]:
    """The modes before each of several forwards, with a change by the program before each of them."""
    state, found = ModelState(model), []
    for _ in range(count):
        change()
        found.append(state.modes())
        model(torch.zeros(1))
        state.settle()
    return found


@pytest.mark.parametrize("size", [1, 100], ids=["values", "versions"])
def test_a_change_by_the_forward_itself_is_no_change(size: int) -> None:
    assert len(set(forwards(Counted(size), lambda: None))) == 1


@pytest.mark.parametrize("size", [1, 100], ids=["values", "versions"])
def test_a_tensor_that_changes_often_is_ignored(size: int) -> None:
    model = Counted(size)
    found = forwards(model, lambda: model.calls.add_(1))
    assert 2 < len(set(found)) < 8
    assert len(set(found[8:])) == 1


def test_nan_is_equal_to_itself() -> None:
    model = Counted()
    model.register_buffer("unknown", torch.tensor([float("nan")]))
    assert len(set(forwards(model, lambda: None))) == 1


def test_a_number_that_becomes_a_matrix_is_followed() -> None:
    model = Counted()
    model.share = 0.0
    state = ModelState(model)
    before = state.modes()
    model.share = torch.zeros(8, 8)
    assert state.modes() != before
    state.settle()
    before = state.modes()
    model.share.fill_(1)
    assert state.modes() != before


def test_another_object_at_the_same_address_is_another() -> None:
    tokens, seen, addresses = Tokens(), [], set()
    for _ in range(50):
        hook = type("Hook", (), {})()
        addresses.add(id(hook))
        seen.append(tokens.of(hook))
        del hook
    assert len(set(seen)) == 50
    assert len(addresses) < 50, "no address was used again"


def test_a_function_that_is_made_again_is_the_same() -> None:
    def made(share: float) -> Callable[[float], float]:
        return lambda x: x * share

    tokens = Tokens()
    assert tokens.of(made(1.0)) == tokens.of(made(1.0)) != tokens.of(made(2.0))
    assert tokens.of(functools.partial(max, 1)) == tokens.of(functools.partial(max, 1))


def test_a_function_with_its_own_name_inside_has_a_token() -> None:
    def repeated(count: int) -> int:
        return repeated(count - 1) if count else 0

    tokens = Tokens()
    assert tokens.of(repeated) == tokens.of(repeated)


def test_saved_tensor_hooks_are_off_only_during_a_proof() -> None:
    packed: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda x: packed.append(name) or x, lambda x: x)

    def save() -> None:
        torch.ones(2, requires_grad=True).square()

    with hooks("outer"):
        with hooks("inner"):
            with only_saved_tensors_hooks():
                save()
            assert packed == []
            save()
        save()
    assert packed == ["inner", "outer"]
