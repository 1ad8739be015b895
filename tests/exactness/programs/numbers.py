# SPDX-License-Identifier: Apache-2.0
"""Models in which a number changes that makes samples mix, and no operation does.

Neither the order of layers nor the autograd graph differs then: only the number's source tells that something is new.
Only the first step of a situation is checked.
"""

import collections
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from tests.exactness.judge import Batch, Step
from tests.exactness.program import Graph, Program, floats, inner, of_shape, per_sample, several


class _Share:
    """A number in an object that nothing can look into, taken as a share of the mean over the samples.

    It is a forward, or a forward hook.
    """

    def __init__(self, value: float) -> None:
        self.held = ctypes.c_double(value)

    def __call__(self, *args: Any) -> torch.Tensor:
        output: torch.Tensor = args[-1]
        return output - self.held.value * output.mean(0)


@dataclass(slots=True)
class _Slots:
    share: float = 0.0


class _Config:
    def __init__(self, share: float) -> None:
        self.share = share


def _replace_configuration(model: Any, optimizer: Any) -> None:
    """Another configuration, at the address of the first one if that is free."""
    m = inner(model)
    address, m.config = id(m.config), None
    made = [_Config(1.0) for _ in range(200)]
    m.config = next((each for each in made if id(each) == address), made[0])


class _Mixing(nn.Module):
    """A module without parameters that takes a share of the mean over the samples away."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = _Share(share)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.share(h)


class _Plain(nn.Module):
    def share(self) -> float:
        return 0.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h - self.share() * h.mean(0)


class _MixingClass(_Plain):
    def share(self) -> float:
        return 1.0


def _between(share: Callable[..., float]) -> Callable[..., torch.Tensor]:
    """A forward with two layers, and between them a share of the mean taken away."""

    def forward(m: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        h = m.first(x)
        return m.last(h - share(m, x, *others) * h.mean(0))

    return forward


def _model(share: Callable[..., float], **members: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Graph(
        _between(share),
        first=nn.Linear(6, 6),
        last=nn.Linear(6, 3),
        **{name: make() for name, make in members.items()},
    )


def _through(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.part(m.first(x)))


def _through_model(part: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Graph(_through, first=nn.Linear(6, 6), part=part(), last=nn.Linear(6, 3))


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model.handle = model[0].register_forward_hook(_Share(0.0))  # type: ignore[assignment]
    return model


def _hook_again(model: Any, optimizer: Any) -> None:
    root = inner(model)
    root.handle.remove()
    root.handle = root[0].register_forward_hook(_Share(1.0))


def _replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3))
    model[1].forward = _Share(0.0)  # type: ignore[assignment]
    return model


def _replace_again(model: Any, optimizer: Any) -> None:
    inner(model)[1].forward = _Share(1.0)


def _ordered(share: _Share) -> Callable[..., torch.Tensor]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = (m.first, m.second)[:: 1 if share.held.value == 0 else -1]
        h = b(a(x))
        return m.last(h - share.held.value * h.mean(0))

    return forward


def _order() -> Program:
    share = _Share(0.0)

    def built() -> nn.Module:
        share.held.value = 0.0
        return Graph(_ordered(share), first=nn.Linear(6, 6), second=nn.Linear(6, 6), last=nn.Linear(6, 3))

    change = of_shape(5, 6, count=3, change=lambda model, optimizer: setattr(share.held, "value", 1.0))
    return _program("order_of_layers", built, change)


def _called(call: Callable[[Any, Batch], torch.Tensor]) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda model, batch: per_sample(call(model, batch), batch)


def _under_autocast(model: Any, batch: Batch) -> torch.Tensor:
    """Autocast from the second batch on, which leaves float64 as it is."""
    x = batch["x"]
    with torch.autocast("cpu", torch.bfloat16, enabled=x.shape[1] == 5):
        return per_sample(model(x), batch)


def _flagged(second: torch.Tensor) -> Callable[[], list[Step]]:
    first = torch.ones(5, dtype=torch.int64)
    return several(*[lambda f=f: floats(5, 6, flags=f) for f in (first, second)])  # type: ignore[misc]


def _set(name: str, value: Any) -> Callable[[], list[Step]]:
    return of_shape(5, 6, count=3, change=lambda model, optimizer: setattr(inner(model), name, value))


def _program(name: str, build: Callable[[], nn.Module], steps: Callable[[], list[Step]], **others: Any) -> Program:
    settings = {"module_options": {"check": "first"}}
    return Program(f"number_of_{name}_mixes", build, steps, "refused", settings=settings, **others)


def _fill(name: str) -> Callable[[Any, Any], None]:
    def change(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            getattr(inner(model), name).fill_(1.0)

    return change


def _with_buffer() -> nn.Module:
    model = _model(lambda m, x: m.share)()
    model.register_buffer("share", torch.zeros(()))
    return model


_growing = several(lambda: floats(6, 4, 6), lambda: floats(6, 5, 6))

PROGRAMS = [
    _program("flag", _model(lambda m, x: float(m.flag), flag=lambda: False), _set("flag", True)),
    _program(
        "mode_of_part",
        _model(lambda m, x: float(m.part.training), part=lambda: nn.Identity().eval()),
        of_shape(5, 6, count=3, change=lambda model, optimizer: inner(model).part.train()),
    ),
    _program(
        "autocast", _model(lambda m, x: float(torch.is_autocast_enabled("cpu"))), _growing, losses=_under_autocast
    ),
    _program(
        "dtype",
        _model(lambda m, x, flags: float(flags.dtype == torch.bool)),
        _flagged(torch.ones(5, dtype=torch.bool)),
    ),
    _program(
        "dimensions",
        _model(lambda m, x, flags: float(flags.ndim == 2)),
        _flagged(torch.ones(5, 2, dtype=torch.int64)),
    ),
    _program(
        "argument",
        _model(lambda m, x, is_mixing: float(is_mixing)),
        _growing,
        losses=_called(lambda model, batch: model(batch["x"], batch["x"].shape[1] == 5)),
    ),
    _program(
        "batch_size",
        _model(lambda m, x: float(len(x) == 9)),
        several(lambda: floats(4, 6), lambda: floats(9, 6)),
    ),
    _program("hook", _hooked, of_shape(5, 6, count=3, change=_hook_again)),
    _program("forward", _replaced, of_shape(5, 6, count=3, change=_replace_again)),
    _program(
        "class",
        _through_model(_Plain),
        of_shape(5, 6, count=3, change=lambda model, _: setattr(inner(model).part, "__class__", _MixingClass)),
    ),
    _program(
        "child",
        _through_model(lambda: _Mixing(0.0)),
        of_shape(5, 6, count=3, change=lambda model, _: setattr(inner(model), "part", _Mixing(1.0))),
    ),
    _order(),
    _program("buffer", _with_buffer, of_shape(5, 6, count=3, change=_fill("share"))),
    _program(
        "replaced_buffer",
        _with_buffer,
        of_shape(5, 6, count=3, change=lambda model, _: setattr(inner(model), "share", torch.ones(()))),
    ),
    *(
        _program(
            f"{name}matrix",
            _model(lambda m, x: m.matrix[0, 0], matrix=lambda: torch.zeros(8, 8)),
            of_shape(5, 6, count=3, change=change),
        )
        for name, change in (
            ("", _fill("matrix")),
            ("replaced_", lambda model, _: setattr(inner(model), "matrix", torch.ones(8, 8))),
        )
    ),
    _program(
        "frozen_parameter",
        _model(
            lambda m, x: m.weight,
            weight=lambda: nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False),
        ),
        of_shape(5, 6, count=3, change=_fill("weight")),
    ),
    _program(
        "tensor",
        _model(lambda m, x: m.weight, weight=lambda: torch.zeros(())),
        of_shape(5, 6, count=3, change=_fill("weight")),
    ),
    _program(
        "slots",
        _model(lambda m, x: m.config.share, config=_Slots),
        of_shape(5, 6, count=3, change=lambda model, _: setattr(inner(model).config, "share", 1.0)),
    ),
    _program(
        "replaced_configuration",
        _model(lambda m, x: m.config.share, config=lambda: _Config(0.0)),
        of_shape(5, 6, count=3, change=_replace_configuration),
    ),
    _program(
        "array",
        _model(lambda m, x: m.shares[1], shares=lambda: numpy.zeros(3)),
        of_shape(5, 6, count=3, change=lambda model, _: inner(model).shares.fill(1.0)),
    ),
    _program(
        "array_scalar",
        _model(lambda m, x: m.share_of, share_of=lambda: numpy.float64(0.0)),
        _set("share_of", numpy.float64(1.0)),
    ),
    _program(
        "ordered_dictionary",
        _model(lambda m, x: m.options["share"], options=lambda: collections.OrderedDict(share=0.0)),
        of_shape(5, 6, count=3, change=lambda model, _: inner(model).options.update(share=1.0)),
    ),
    _program(
        "tuple",
        _model(lambda m, x: m.options[1], options=lambda: (2, 0.0)),
        _set("options", (2, 1.0)),
    ),
    _program(
        "tensor_instead_of_number",
        _model(lambda m, x: m.share_of, share_of=lambda: 0.0),
        _set("share_of", torch.ones(())),
    ),
]
