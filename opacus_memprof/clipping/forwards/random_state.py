# SPDX-License-Identifier: Apache-2.0
"""The states of all random number generators that a forward may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class RandomState:
    """The states of the generators of torch, Python and NumPy at one moment.

    Attributes:
        cpu: the state of torch's CPU generator.
        cuda: for each GPU that is used, its index and the state of its generator.
        python: the state of Python's generator.
        numpy: the state of NumPy's legacy generator; None if NumPy was not imported.
    """

    cpu: torch.Tensor
    cuda: list[tuple[int, torch.Tensor]]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, *devices: torch.device) -> RandomState:
        """Returns the current states of the CPU's generators, and of the GPUs among `devices`."""
        gpus = sorted({each.index for each in devices if each.type == "cuda"})
        cuda = [(index, torch.cuda.get_rng_state(index)) for index in gpus]
        numpy = sys.modules.get("numpy.random")
        return cls(torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.get_state())

    def device_type(self) -> str:
        """Returns the type of the device whose generator is included in addition to the CPU's."""
        return "cuda" if self.cuda else "cpu"

    def has_moved(self) -> bool:
        """Returns whether a random number has been drawn since then."""
        now = RandomState.now()
        if not torch.equal(self.cpu, now.cpu) or self.python != now.python or not _same_numpy(self.numpy, now.numpy):
            return True
        return any(not torch.equal(torch.cuda.get_rng_state(index), state) for index, state in self.cuda)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda:
            torch.cuda.set_rng_state(state, index)
        self._set_others(sys.modules.get("numpy.random"), self.python, self.numpy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Sets the generators to these states inside the context, and to their previous states afterwards."""
        with torch.random.fork_rng([index for index, _ in self.cuda]):
            numpy = sys.modules.get("numpy.random")
            others = random.getstate(), None if numpy is None else numpy.get_state()
            self.restore()
            try:
                yield
            finally:
                self._set_others(numpy, *others)

    def _set_others(self, numpy: Any, python: Any, of_numpy: Any) -> None:
        random.setstate(python)
        if numpy is not None and of_numpy is not None:
            numpy.set_state(of_numpy)


def _same_numpy(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a[0] == b[0] and (a[1] == b[1]).all() and a[2:] == b[2:])
