# SPDX-License-Identifier: Apache-2.0
"""Models that begin to mix samples because of a global variable, a configuration, a closure or the environment.

Only the first step of a situation is checked: the change is seen when it happens, and not when a known situation is
checked again.
"""

import ctypes
import enum
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.exactness.program import Program, inner, of_shape

MIXES, SHARE = False, 0.0
NAMESPACE = SimpleNamespace(mixes=False, share=0.0)
TABLE: dict[str, Any] = {"mixes": False}


class Kind(enum.Enum):
    PLAIN = 0
    MIXED = 1


@dataclass
class Part:
    mixes: bool = False
    share: float = 0.0


@dataclass
class Config:
    part: Part = field(default_factory=Part)


def centered(h: torch.Tensor) -> torch.Tensor:
    return h - h.mean(0)


def untouched(h: torch.Tensor) -> torch.Tensor:
    return h


def centered_by_global(h: torch.Tensor) -> torch.Tensor:
    return centered(h) if MIXES else h


class Between(nn.Module):
    """Two layers with ``between`` between them."""

    mixes = False
    share = 0.0

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor], **members: Any) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 6), nn.Linear(6, 3), between
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.last(self.middle(self.first(x)))
        return h

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.between(self, h)


class Patched(Between):
    """A class whose method is replaced."""


def with_closure() -> Between:
    mixes = False

    def between(m: Any, h: torch.Tensor) -> torch.Tensor:
        return centered(h) if mixes else h

    def flip() -> None:
        nonlocal mixes
        mixes = True

    return Between(between, flip=flip)


def with_buffer() -> Between:
    model = Between(lambda m, h: centered(h) if m.switch else h)
    model.register_buffer("switch", torch.tensor(False))
    return model


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: globals().__setitem__(name, value)


def reset() -> None:
    globals().update(MIXES=False, SHARE=0.0)
    NAMESPACE.mixes, NAMESPACE.share, TABLE["mixes"] = False, 0.0, False
    Between.mixes, Between.share = False, 0.0
    Patched.middle = Between.middle  # type: ignore[method-assign]
    os.environ.pop("SAMPLES_MIX", None)


# Name: how the model is built, and what changes.
FLIPS: dict[str, tuple[Callable[[], Between], Callable[[Any], object]]] = {
    "global_flag": (lambda: Between(lambda m, h: centered(h) if MIXES else h), set_global("MIXES", True)),
    "global_of_called_function": (lambda: Between(lambda m, h: centered_by_global(h)), set_global("MIXES", True)),
    "global_number": (lambda: Between(lambda m, h: h - SHARE * h.mean(0)), set_global("SHARE", 1.0)),
    "global_namespace": (
        lambda: Between(lambda m, h: centered(h) if NAMESPACE.mixes else h),
        lambda m: setattr(NAMESPACE, "mixes", True),
    ),
    "global_namespace_number": (
        lambda: Between(lambda m, h: h - NAMESPACE.share * h.mean(0)),
        lambda m: setattr(NAMESPACE, "share", 1.0),
    ),
    "global_table": (
        lambda: Between(lambda m, h: centered(h) if TABLE["mixes"] else h),
        lambda m: TABLE.update(mixes=True),
    ),
    "class_flag": (
        lambda: Between(lambda m, h: centered(h) if m.mixes else h),
        lambda m: setattr(Between, "mixes", True),
    ),
    "class_number": (
        lambda: Between(lambda m, h: h - m.share * h.mean(0)),
        lambda m: setattr(Between, "share", 1.0),
    ),
    "class_method": (
        lambda: Patched(lambda m, h: h),
        lambda m: setattr(Patched, "middle", lambda m, h: centered(h)),
    ),
    "configuration": (
        lambda: Between(lambda m, h: centered(h) if m.config.part.mixes else h, config=Config()),
        lambda m: setattr(m.config.part, "mixes", True),
    ),
    "configuration_number": (
        lambda: Between(lambda m, h: h - m.config.part.share * h.mean(0), config=Config()),
        lambda m: setattr(m.config.part, "share", 1.0),
    ),
    "another_configuration": (
        lambda: Between(lambda m, h: h - m.config.part.share * h.mean(0), config=Config()),
        lambda m: setattr(m, "config", Config(Part(share=1.0))),
    ),
    "dictionary_number": (
        lambda: Between(lambda m, h: h - m.settings["share"] * h.mean(0), settings={"share": 0.0}),
        lambda m: m.settings.update(share=1.0),
    ),
    "list_number": (
        lambda: Between(lambda m, h: h - m.shares[0] * h.mean(0), shares=[0.0]),
        lambda m: m.shares.__setitem__(0, 1.0),
    ),
    "set_of_names": (
        lambda: Between(lambda m, h: centered(h) if "mix" in m.names else h, names=set()),
        lambda m: m.names.add("mix"),
    ),
    "enumeration": (
        lambda: Between(lambda m, h: centered(h) if m.kind is Kind.MIXED else h, kind=Kind.PLAIN),
        lambda m: setattr(m, "kind", Kind.MIXED),
    ),
    "own_function": (
        lambda: Between(lambda m, h: m.step(h), step=untouched),
        lambda m: setattr(m, "step", centered),
    ),
    "closure": (with_closure, lambda m: m.flip()),
    "buffer": (with_buffer, lambda m: m.switch.fill_(True)),
    "environment": (
        lambda: Between(lambda m, h: centered(h) if "SAMPLES_MIX" in os.environ else h),
        lambda m: os.environ.update(SAMPLES_MIX="1"),
    ),
}


def _program(name: str) -> Program:
    build, flip = FLIPS[name]

    def built() -> Between:
        reset()
        return build()

    return Program(
        f"hidden_{name}_mixes_later",
        built,
        of_shape(5, 6, count=4, change=lambda model, optimizer: flip(inner(model)), at=2),
        "refused",
        settings={"module_options": {"check": "first"}},
    )


def _seen_by_a_check() -> Program:
    """A number in memory that the program shares with a tensor. Only the second step's check of mixing sees it."""
    unseen = ctypes.c_double(0.0)
    shares = itertools.repeat(torch.frombuffer(unseen, dtype=torch.float64))  # the values of a program's own are seen

    def built() -> Between:
        unseen.value = 0.0
        return Between(lambda m, h: h - next(shares) * h.detach().mean(0))

    return Program(
        "hidden_unseen_number_mixes_at_a_check",
        built,
        of_shape(5, 6, count=4, change=lambda model, optimizer: setattr(unseen, "value", 1e-5), at=1),
        "refused",
        settings={"module_options": {"check": "sometimes"}},
    )


PROGRAMS = [*(_program(name) for name in FLIPS), _seen_by_a_check()]
