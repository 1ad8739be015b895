# SPDX-License-Identifier: Apache-2.0
"""Losses of tensors that the model is not called with: labels, masks, targets, tables."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tests.exactness.judge import Batch, Change, Step, step
from tests.exactness.program import Allowed, Graph, Program

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_PROTOTYPES = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
_WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 0.5, 3.0], dtype=torch.float64)
_COUNTS = torch.tensor([10, 20, 50, 40, 30])
_MOVING = torch.ones(5, 5, dtype=torch.float64)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))


def _labelled(*sizes: int) -> Callable[[], Sequence[Step]]:
    return lambda: [
        step({"x": torch.randn(n, 6, dtype=torch.float64), "y": torch.arange(n).square() * (at + 1) % 5})
        for at, n in enumerate(sizes)
    ]


def _weighted() -> Sequence[Step]:
    """Of floating-point weights, and a table that the program changes, each step has other ones."""

    def moves(at: int) -> Change:
        def change(model: Any, optimizer: Any) -> None:
            _MOVING.copy_(torch.arange(1, 26).view(5, 5) / (at + 20))

        return change

    weights = torch.ones(5), torch.arange(5.0), 1 + torch.arange(5.0)
    return [
        step({"x": torch.randn(5, 6, dtype=torch.float64), "w": w.to(torch.float64)}, moves(at))
        for at, w in enumerate(weights)
    ]


def _squares(h: torch.Tensor) -> torch.Tensor:
    return h.square().sum(1)


def _of_valid(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y > 0).to(h.dtype)
    return (_squares(h) * mask).sum() / mask.sum().clamp(min=1)


def _of_weighted(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = _WEIGHTS.to(h.dtype)[y]
    return (_squares(h) * weights).sum() / weights.sum()


def _balanced(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(h, y, reduction="none") / torch.bincount(y, minlength=5).to(h.dtype)[y]


def _mixed_targets(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    target = functional.one_hot(y, 5).to(h.dtype)
    return -((0.7 * target + 0.3 * target.roll(1, 0)) * h.log_softmax(1)).sum(1)


def _normalized_targets(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    target = y.to(h.dtype)
    return (h[:, 0] - target + target.mean()).square()


def _by_row(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(h))
    return -h.log_softmax(1)[rows, y]


def _looks_at_two(model: Any, batch: Batch) -> torch.Tensor:
    """As many features as samples, or twice as many."""
    h = model(batch["x"])
    with torch.no_grad():
        model(batch["x"][:2])
    return _squares(h)


def _rows_before(model: Any, batch: Batch) -> torch.Tensor:
    rows = torch.arange(len(batch["x"]))
    return -torch.as_tensor(model(batch["x"])).log_softmax(1)[rows, batch["y"]]


class _ByClass(torch.autograd.Function):
    """Divides each sample's gradient by the number of samples of its class."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return h.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return g / torch.bincount(y, minlength=5)[y].unsqueeze(1), None


class _OfSizeOne(torch.autograd.Function):
    """Divides gradients by their norm."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / (1 + g.norm())


_OF_WEIGHTS: dict[str, tuple[Loss, Allowed]] = {
    "weights": (lambda h, w: _squares(h) * w, "exact"),
    "shared_weights": (lambda h, w: (_squares(h) * w).sum() / w.sum(), "refused"),
    "moving_table": (lambda h, w: _squares(h @ _MOVING.to(h)) * w, "exact"),
}


# The tables have as many rows as a batch has samples.
_LOSSES: dict[str, tuple[Loss, Allowed]] = {
    "of_valid": (_of_valid, "refused"),
    "of_weighted": (_of_weighted, "refused"),
    "balanced": (_balanced, "refused"),
    "mixed_targets": (_mixed_targets, "refused"),
    "normalized_targets": (_normalized_targets, "refused"),
    "counted_in_backward": (lambda h, y: _squares(_ByClass.apply(h, y)), "refused"),
    "divided_in_backward": (lambda h, y: _squares(_OfSizeOne.apply(h)), "refused"),
    "masked": (lambda h, y: _squares(h) * (y > 0), "exact"),
    "entropy": (lambda h, y: functional.cross_entropy(h, y, reduction="none"), "exact"),
    "class_weights": (lambda h, y: functional.cross_entropy(h, y, _WEIGHTS, reduction="none"), "exact"),
    "weights_of_a_table": (lambda h, y: _squares(h) * _WEIGHTS[y], "exact"),
    "weights_by_column": (lambda h, y: (h.square() * _WEIGHTS).sum(1), "exact"),
    "prototypes": (lambda h, y: _squares(h[:, :3] - _PROTOTYPES[y]), "exact"),
    "rows_by_number": (_by_row, "exact"),
    "counts_of_classes": (lambda h, y: functional.cross_entropy(h - _COUNTS.to(h).log(), y, reduction="none"), "exact"),
    "all_prototypes": (lambda h, y: torch.cdist(h[:, :3], _PROTOTYPES).square().sum(1), "exact"),
}


def _losses_of(loss: Loss) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda model, batch: loss(model(batch["x"]), batch["y"])


def _two_outputs() -> nn.Module:
    """The second output is computed from the first."""
    return Graph(
        lambda m, x: (lambda h: (h, m.last(torch.tanh(h))))(m.first(x)), first=nn.Linear(6, 5), last=nn.Linear(5, 5)
    )


def _of_two(model: Any, batch: Batch) -> torch.Tensor:
    h, out = model(batch["x"])
    return _squares(h) + functional.cross_entropy(out, batch["y"], reduction="none")


def _ragged(*steps: tuple[int, ...]) -> Callable[[], Sequence[Step]]:
    """Steps of labels, of which each sample has so many that are not ignored."""

    def labels(counts: tuple[int, ...]) -> torch.Tensor:
        rows = [torch.randperm(5) < n for n in counts]
        return torch.randint(5, (len(counts), 5)).masked_fill(~torch.stack(rows), -100)

    return lambda: [
        step({"x": torch.randn(len(counts), 5, 6, dtype=torch.float64), "y": labels(counts)}) for counts in steps
    ]


def _divided(h: torch.Tensor, y: torch.Tensor, count: Any) -> torch.Tensor:
    return functional.cross_entropy(h.flatten(0, 1), y.flatten(), reduction="sum") / count


def _counted(count: Callable[[torch.Tensor], Any], is_inside: bool, steps: Any, allowed: Allowed) -> Program:
    """The labels are counted before the model is called, as transformers' Trainer does."""

    def losses(model: Any, batch: Batch) -> torch.Tensor:
        n = count(batch["y"])
        return model(batch["x"], batch["y"], n) if is_inside else _divided(model(batch["x"]), batch["y"], n)

    def build() -> nn.Module:
        inside = Graph(lambda m, x, y, n: _divided(m.a(x), y, n), a=_model())
        return inside if is_inside else _model()

    name = f"{'inside' if is_inside else 'outside'}_{'tensor' if count is _as_tensor else 'number'}_{allowed}"
    return Program(f"counted_before_{name}", build, steps, allowed, losses, settings={"reduction": "mean"})


def _by_constant(model: Any, batch: Batch, factor: float) -> torch.Tensor:
    losses = functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
    return losses.unflatten(0, (-1, 5)).sum(1) * factor


def _as_tensor(y: torch.Tensor) -> torch.Tensor:
    return (y != -100).sum()


PROGRAMS = [
    Program("labels_of_two_outputs", _two_outputs, _labelled(5, 5), "exact", _of_two, {"removes": False}),
    *(
        Program(f"labels_{name}", _model, _labelled(5, 5), allowed, _losses_of(loss), {"removes": False})
        for name, (loss, allowed) in _LOSSES.items()
    ),
    Program("labels_call_of_two_samples", _model, _labelled(3, 6), "exact", _looks_at_two, {"removes": False}),
    Program("labels_rows_before_the_call", _model, _labelled(5, 4), "exact", _rows_before, {"removes": False}),
    *(
        Program(
            f"labels_{name}",
            _model,
            _weighted,
            allowed,
            lambda model, batch, loss=loss: loss(model(batch["x"]), batch["w"]),  # type: ignore[misc]
            {"removes": False, "reduction": "mean"},
        )
        for name, (loss, allowed) in _OF_WEIGHTS.items()
    ),
    Program(
        "labels_after_batches_of_one", _model, _labelled(1, 1, 5), "refused", _losses_of(_of_valid), {"removes": False}
    ),
    *(
        _counted(count, is_inside, _ragged(*3 * [counts]), allowed)
        for count in (_as_tensor, lambda y: int((y != -100).sum()))
        for is_inside in (True, False)
        for counts, allowed in (((3, 3, 3, 3), "exact"), ((3, 1, 5, 2), "refused"))
    ),
    Program(
        "counted_by_chance_as_a_constant",  # as many labels as the divisor, in the second step
        _model,
        _ragged((3, 3, 3, 3), (3, 1, 5, 2), (3, 1, 5, 2)),
        "exact",
        lambda model, batch: _by_constant(model, batch, 1 / 11),
    ),
    Program(
        "counted_by_chance_as_a_weight",
        _model,
        _ragged((3, 1, 4, 2)),
        "exact",
        lambda model, batch: _by_constant(model, batch, 0.1),
    ),
]
