# SPDX-License-Identifier: Apache-2.0
"""The states of all random number generators that a model may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomState:
    """The states of the generators of Python, NumPy and torch, as they are when this is made.

    Args:
        devices: the devices whose generators count; the CPU's always does.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.devices = sorted({each for each in devices if each.type == "cuda"}, key=str)
        self._python = random.getstate()
        self._numpy = _numpy_random().get_state() if "numpy" in sys.modules else None
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(each) for each in self.devices]

    def restore(self) -> None:
        """Sets the generators to these states."""
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in zip(self.devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    def has_changed(self) -> bool:
        """Returns whether a generator has drawn numbers since."""
        now = RandomState(self.devices)
        return (
            self._python != now._python
            or (self._numpy is not None and _comparable(self._numpy) != _comparable(now._numpy))
            or not torch.equal(self._cpu, now._cpu)
            or any(not torch.equal(a, b) for a, b in zip(self._cuda, now._cuda, strict=True))
        )


@contextmanager
def kept_random_state(devices: Iterable[torch.device] = ()) -> Iterator[RandomState]:
    """Leaves the generators as they were."""
    state = RandomState(devices)
    try:
        yield state
    finally:
        state.restore()


def _numpy_random() -> Any:
    return sys.modules["numpy"].random


def _comparable(state: Any) -> tuple[Any, ...]:
    """The legacy state of NumPy's generator, with its array as bytes."""
    return tuple(each.tobytes() if hasattr(each, "tobytes") else each for each in state)
