# SPDX-License-Identifier: Apache-2.0
"""Models in which data of a batch stays: in buffers, in attributes, and in parameters that their forward writes to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.program import Allowed, Graph, Program, of_shape

Between = Callable[[Any, torch.Tensor], torch.Tensor]


def _averaged(m: Any, h: torch.Tensor) -> torch.Tensor:
    before = m.average.clone()
    with torch.no_grad():
        m.average.mul_(0.5).add_(h.mean(0), alpha=0.5)
    return before


def _by_moving_average(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h - _averaged(m, h)


def _observed(m: Any, h: torch.Tensor) -> torch.Tensor:
    _averaged(m, h)
    return h


def _by_earlier(m: Any, h: torch.Tensor) -> torch.Tensor:
    earlier, m.earlier = getattr(m, "earlier", None), h.detach().mean(0)
    return h if earlier is None else h - earlier


def _recurrent(m: Any, h: torch.Tensor) -> torch.Tensor:
    earlier, m.earlier = getattr(m, "earlier", None), h.detach()
    return h if earlier is None else h + 0.5 * earlier


def _from_bank(m: Any, h: torch.Tensor) -> torch.Tensor:
    bank = torch.stack(m.bank) if m.bank else torch.zeros(1, 6, dtype=h.dtype)
    m.bank.append(h.detach()[0])
    return h + (h @ bank.T).softmax(1) @ bank


def _writes_weight(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.last.weight.add_(1e-3 * h.mean())
    return h


def _writes_data(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.last.weight.data.copy_(m.last.weight + 1e-3 * h.detach().mean())
    return h


def _renormalizes(m: Any, h: torch.Tensor) -> torch.Tensor:
    torch.embedding_renorm_(m.last.weight.detach(), torch.tensor([0]), 0.1, 2.0)
    return h


def _counted(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return h * (1 + 0.5 / int(m.count))


def _kept_loss(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.penalty = h.square().mean()
    return h


def _not_saved(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.largest.copy_(h.detach().abs().amax())
    return h


def _model(between: Between, **buffers: tuple[torch.Tensor, bool]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Graph(lambda m, x: m.last(between(m, m.first(x))), first=nn.Linear(6, 6), last=nn.Linear(6, 3), bank=[])
        for name, (value, is_saved) in buffers.items():
            model.register_buffer(name, value.clone(), persistent=is_saved)
        return model

    return build


def _program(name: str, between: Between, allowed: Allowed, **buffers: tuple[torch.Tensor, bool]) -> Program:
    return Program(f"carried_{name}", _model(between, **buffers), of_shape(5, 6, count=2), allowed)


_AVERAGE = {"average": (torch.zeros(6), True)}


class _CapturingModel(nn.Module):
    """As in transformers: the first forward registers hooks that collect what layers return, and notes that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.collected: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "is_capturing", False):
            self.first.register_forward_hook(lambda module, args, output: self.collected.append(output))
            self.is_capturing = True
        y: torch.Tensor = self.last(torch.tanh(self.first(x)))
        collected = [y, *self.collected]
        self.collected.clear()
        return torch.cat(collected, -1)


PROGRAMS = [
    _program("moving_average", _by_moving_average, "refused", **_AVERAGE),
    _program("moving_average_not_saved", _by_moving_average, "refused", average=(torch.zeros(6), False)),
    _program("observer", _observed, "refused", **_AVERAGE),
    _program("earlier_mean", _by_earlier, "refused"),
    _program("recurrent_state", _recurrent, "refused"),
    _program("memory_bank", _from_bank, "refused"),
    _program("weight_written", _writes_weight, "refused"),
    _program("weight_written_through_data", _writes_data, "refused"),
    _program("weight_renormalized", _renormalizes, "refused"),
    Program(
        "carried_counter",
        _model(_counted, count=(torch.zeros((), dtype=torch.int64), True)),
        of_shape(5, 6, count=2),
        "exact",
        settings={"is_random": True},  # the oracle runs one forward a step, too
    ),
    _program("loss_in_attribute", _kept_loss, "exact"),
    _program("buffer_not_saved", _not_saved, "exact", largest=(torch.zeros(()), False)),
    Program("carried_hooks_of_the_first_forward", _CapturingModel, of_shape(5, 4, 6, count=3), "exact"),
]
