# SPDX-License-Identifier: Apache-2.0
"""Modes that follow a program are entered and left while garbage collection ends those of models that are gone."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from opacus_memprof.clipping.module.read_numbers import FollowingMode, following_modes, unfollowed


class _Following(FollowingMode):
    def note_read(self, x: torch.Tensor) -> None:
        pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Model:
    """Garbage at once, with a mode that is on."""

    def __init__(self) -> None:
        self.itself, self.mode = self, _Following()
        self.mode.enter()

    def __del__(self) -> None:
        self.mode.leave()


@pytest.fixture
def mode() -> Iterator[_Following]:
    before, mode = gc.get_threshold(), _Following()
    mode.enter()
    yield mode
    gc.set_threshold(*before)
    mode.leave()


@pytest.mark.parametrize("objects", range(1, 8))
def test_collection_in_the_midst_of_a_move_leaves_the_other_modes(
    mode: _Following, objects: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    gc.set_threshold(objects)
    for _ in range(30):
        _Model()
        mode.leave()
        mode.enter()
    gc.collect()
    assert following_modes() == [mode]
    assert not errors


def test_a_mode_that_is_left_while_none_follows_stays_off(mode: _Following) -> None:
    with unfollowed():
        mode.leave()
    assert following_modes() == []
