# SPDX-License-Identifier: Apache-2.0
"""Models that begin to mix because a number changes that they read from a place where nobody looks.

Only the first step of a situation is checked. The number changes no operation: it is seen as an operation's argument.
"""

import array
import builtins
import collections
import contextvars
import ctypes
import functools
import itertools
import queue
import tempfile
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.judge import Step, step
from tests.exactness.program import Graph, Program, floats, inner, of_shape

_CONTEXT = contextvars.ContextVar("share", default=0.0)
_LOCAL = threading.local()
_CELL = ctypes.c_double(0.0)
_COUNT = itertools.count(1)
_TABLES: dict[int, torch.Tensor] = {}


class _Meta(type):
    share = 0.0


class _OfMeta(metaclass=_Meta):
    pass


class _Holder:
    def __init__(self) -> None:
        self.share = 0.0

    def read(self) -> float:
        return self.share


def _in_file(value: float | None = None) -> float:
    path = f"{tempfile.gettempdir()}/opacus_memprof_share"
    if value is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(value))
    with open(path, encoding="utf-8") as file:
        return float(file.read())


# Name: what the model holds, how it reads the number, and how the program changes it.
PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any, float], object]]] = {
    "context_variable": (object, lambda _: _CONTEXT.get(), lambda _, v: _CONTEXT.set(v)),
    "thread_local": (object, lambda _: _LOCAL.share, lambda _, v: setattr(_LOCAL, "share", v)),
    "file": (object, lambda _: _in_file(), lambda _, v: _in_file(v)),
    "builtins": (object, lambda _: builtins._share, lambda _, v: setattr(builtins, "_share", v)),  # type: ignore[attr-defined]
    "c_memory": (object, lambda _: _CELL.value, lambda _, v: setattr(_CELL, "value", v)),
    "metaclass": (object, lambda _: _OfMeta.share, lambda _, v: setattr(_Meta, "share", v)),
    "queue_end": (collections.deque, lambda d: d[-1], lambda d, v: d.append(v)),
    "queue": (queue.Queue, lambda q: q.queue[-1], lambda q, v: q.put(v)),
    "array": (lambda: array.array("d"), lambda a: a[-1], lambda a, v: a.append(v)),
    "chain_of_maps": (lambda: collections.ChainMap({}), lambda m: m["share"], lambda m, v: m.update(share=v)),
    "size_of_set": (set, lambda s: float(len(s)), lambda s, v: s.update(range(int(v)))),
    "partial_function": (
        lambda: [functools.partial(float, 0.0)],
        lambda f: f[0](),
        lambda f, v: f.__setitem__(0, functools.partial(float, v)),
    ),
    "bound_method": (lambda: _Holder().read, lambda f: f(), lambda f, v: setattr(f.__self__, "share", v)),
    "default_argument": (
        lambda: lambda share=0.0: share,
        lambda f: f(),
        lambda f, v: setattr(f, "__defaults__", (v,)),
    ),
    "deep_inside": (
        lambda: {"a": [types.SimpleNamespace(b=[[[0.0]]])]},
        lambda d: d["a"][0].b[0][0][0],
        lambda d, v: d["a"][0].b[0][0].__setitem__(0, v),
    ),
}


def _subtracted(share: Any, h: torch.Tensor) -> torch.Tensor:
    return h - share * h.mean(0)


USES: dict[str, Callable[[float, torch.Tensor], torch.Tensor]] = {
    "multiplied": _subtracted,
    "of_data": lambda share, h: h - share * h.detach().mean(0),
    "as_alpha": lambda share, h: torch.sub(h, h.mean(0), alpha=share),
    "as_tensor": lambda share, h: _subtracted(torch.tensor(share), h),
    "filled": lambda share, h: _subtracted(torch.full((), float(share), dtype=h.dtype), h),
    "interpolated": lambda share, h: torch.lerp(h, h.mean(0).expand_as(h), share),
    "clamped": lambda share, h: h - h.mean(0).clamp(-share, share),
    "raised": lambda share, h: h * (1 + h.square().mean(0)) ** share,
    "dimension": lambda share, h: h.softmax(1 - int(share)),
    "operation": lambda share, h: h - (h.detach().mean(0) if share else h.detach()[0] * 0 + 1),
}


def _program(name: str, place: str, use: Callable[[float, torch.Tensor], torch.Tensor]) -> Program:
    make, read, write = PLACES[place]

    def build() -> nn.Module:
        held = make()
        write(held, 0.0)
        return Graph(
            lambda m, x: m.last(use(read(m.held), m.first(x))), first=nn.Linear(6, 6), last=nn.Linear(6, 3), held=held
        )

    return Program(
        f"anywhere_{name}",
        build,
        of_shape(5, 6, count=3, change=lambda model, optimizer: write(inner(model).held, 1.0)),
        "refused",
        settings={"module_options": {"check": "first"}},
    )


def _cooled(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x) / _CELL.value))  # type: ignore[no-any-return]


def _by_turns(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Subtracts a share of the batch's mean, and a share of each sample's."""
    h = m.first(x)
    for dim, share in enumerate(m.held):
        h = h - share * h.mean(dim, keepdim=True)
    return m.last(h)  # type: ignore[no-any-return]


def _cooler_each_step() -> list[Step]:
    """A temperature treats samples alone, also where it is another one in every step."""
    return [
        step(floats(5, 6), lambda model, optimizer, n=n: setattr(_CELL, "value", 0.9**n))  # type: ignore[misc]
        for n in range(12)
    ]


def _once(use: Callable[[float, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A forward with a number that another forward does not find."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h, share = m.first(x), _CELL.value
        if share and len(x) > 1:
            _CELL.value = 0.0
            h = use(share, h)
        return m.last(h)  # type: ignore[no-any-return]

    return forward


def _taken_once(name: str, use: Callable[[float, torch.Tensor], torch.Tensor]) -> Program:
    """The forward that mixes is run again, and the output is that run's."""

    def build() -> nn.Module:
        _CELL.value = 0.0
        return Graph(_once(use), first=nn.Linear(6, 6), last=nn.Linear(6, 3))

    return Program(
        f"anywhere_once_{name}",
        build,
        of_shape(5, 6, count=3, change=lambda model, optimizer: setattr(_CELL, "value", 1.0)),
        "exact",
        settings={"module_options": {"check": "first"}},
    )


def _divided_by_count(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x) * (1 + 1 / next(_COUNT)))  # type: ignore[no-any-return]


def _with_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    if 6 not in _TABLES:
        _TABLES[6] = torch.arange(6, dtype=x.dtype).mul(0.5).cos()
    return m.last(m.first(x) * _TABLES[6])  # type: ignore[no-any-return]


PROGRAMS = [
    *(_taken_once(name, USES[name]) for name in ("multiplied", "of_data", "dimension")),
    *(
        Program(
            f"anywhere_{name}",
            lambda forward=forward: Graph(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 3)),  # type: ignore[misc]
            of_shape(5, 6, count=3),
            outcome,
            settings={"module_options": {"check": "first"}},
        )
        for name, forward, outcome in [
            ("counted", _divided_by_count, "refused"),
            ("table", _with_table, "exact"),
        ]
    ),
    *(_program(place, place, _subtracted) for place in PLACES),
    Program(
        "anywhere_annealed",
        lambda: Graph(_cooled, first=nn.Linear(6, 6), last=nn.Linear(6, 3)),
        _cooler_each_step,
        "exact",
        settings={"module_options": {"check": "first"}},
    ),
    Program(
        "anywhere_swapped",
        lambda: Graph(_by_turns, first=nn.Linear(6, 6), last=nn.Linear(6, 3), held=collections.deque([0.0, 1.0])),
        of_shape(5, 6, count=3, change=lambda model, optimizer: inner(model).held.reverse()),
        "refused",
        settings={"module_options": {"check": "first"}},
    ),
    *(_program(f"use_{name}", "c_memory", use) for name, use in USES.items()),
]
