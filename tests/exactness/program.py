# SPDX-License-Identifier: Apache-2.0
"""Programs, and what they are made of."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tests.exactness.judge import Batch, Change, Losses, Step, Verdict, judge, step

Allowed = Literal["exact", "refused", "either"]


def losses_of_outputs(model: Any, batch: Batch) -> torch.Tensor:
    """The losses of a model that is called with the batch's tensors except ``scale``, and returns a tensor."""
    return per_sample(model(*inputs(batch)), batch)


def loss_of_the_model(model: Any, batch: Batch) -> torch.Tensor:
    """The loss that a model returns which is called with the batch's tensors except ``scale``."""
    loss: torch.Tensor = model(*inputs(batch))
    return loss


def inputs(batch: Batch) -> list[torch.Tensor]:
    """What the model is called with."""
    return [x for key, x in batch.items() if key != "scale"]


def per_sample(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[B] of [B, ...]: a linear and a square term, times the samples' scales."""
    flat = output.flatten(1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    weights = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
    return ((flat * weights).sum(1) + 0.5 * flat.square().sum(1)) * batch["scale"]


@dataclass(frozen=True)
class Program:
    """A program and the outcomes that are allowed.

    Attributes:
        name: unique.
        build, steps, losses: see ``judge``.
        allowed: "exact", "refused", or "either".
        settings: see ``judge.Settings``; contributions of single samples are measured unless a program draws random
            numbers.
        seeds: the worst of these counts.
        run: replaces ``judge`` for loops of their own.
        nightly: whether another program goes the same way, and ``make test`` leaves this one out.
    """

    name: str
    build: Callable[[], nn.Module]
    steps: Callable[[], Sequence[Step]]
    allowed: Allowed
    losses: Losses = losses_of_outputs
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    run: Callable[[int], Verdict] | None = None
    nightly: bool = False

    def verdict(self) -> Verdict:
        """Runs the program with each seed."""
        removes = self.allowed != "refused" and not self.settings.get("is_random")  # draws depend on the batch's size
        settings = {"removes": removes, **self.settings}
        worst: Verdict | None = None
        for seed in self.seeds:
            found = self.run(seed) if self.run else judge(self.build, self.steps, self.losses, seed, **settings)
            worst = found if worst is None else worst.worse(found)
        assert worst is not None
        return worst

    def accepts(self, verdict: Verdict) -> bool:
        """Returns whether the outcome is allowed."""
        return verdict.outcome == self.allowed or (self.allowed == "either" and verdict.outcome in ("exact", "refused"))


class Graph(nn.Module):
    """A module made of a forward function, called with the module and the arguments, and of named layers or values."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def changed_in_backward(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns an identity whose backward changes the gradient."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return change(g)

    return Identity.apply  # type: ignore[no-any-return]


_BACKWARDS = itertools.count(1)


@changed_in_backward
def rounded_anew(g: torch.Tensor) -> torch.Tensor:
    """Rounds otherwise in every call, as kernels with atomic operations do, but more."""
    places = torch.arange(g.numel(), dtype=g.dtype).view_as(g)
    return g * (1 + 1e-9 * torch.sin(places * places + next(_BACKWARDS)))


def scales(size: int) -> torch.Tensor:
    """Loss scales, some of which are much larger or smaller than the others."""
    return torch.tensor([1.0, 100.0, 0.01, 2.0, 0.5, 7.0, 1.5, 0.2, 3.0], dtype=torch.float64).repeat(4)[:size]


def floats(*shape: int, **others: torch.Tensor) -> Batch:
    """A batch of one random input of this shape, whose first dimension is the batch."""
    return {"x": torch.randn(*shape, dtype=torch.float64), **others, "scale": scales(shape[0])}


def token_ids(size: int, tokens: int, vocabulary: int = 11) -> Batch:
    """A batch of token ids from 1 on."""
    return {"ids": torch.randint(1, vocabulary, (size, tokens)), "scale": scales(size)}


def ragged_ids(lengths: Sequence[int], vocabulary: int = 11) -> Batch:
    """A batch of token ids that are padded with 0."""
    batch = token_ids(len(lengths), max(*lengths, 5), vocabulary)
    for row, length in zip(batch["ids"], lengths, strict=True):
        row[length:] = 0
    return batch


def several(*makers: Callable[[], Batch], change: Change | None = None, at: int = 1) -> Callable[[], list[Step]]:
    """Steps of single batches, with a change before one of them."""
    return lambda: [step(make(), change if n == at else None) for n, make in enumerate(makers)]


def of_shape(*shape: int, count: int = 1, change: Change | None = None, at: int = 1) -> Callable[[], list[Step]]:
    """Steps of random inputs of one shape."""
    return several(*[lambda: floats(*shape)] * count, change=change, at=at)


def inner(model: Any) -> Any:
    """The model without its wrapper."""
    return getattr(model, "_module", model)
