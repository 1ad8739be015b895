# SPDX-License-Identifier: Apache-2.0
"""Samples that influence one another, in ways that some inputs, sizes or steps hide. All of these must be refused."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.exactness.judge import Batch, Step, step
from tests.exactness.program import Graph, Program, changed_in_backward, floats, of_shape, scales, several

Mix = Callable[[torch.Tensor], torch.Tensor]


def _graph(mix: Callable[..., torch.Tensor], width: int = 6) -> Callable[[], nn.Module]:
    return lambda: Graph(lambda m, x: m.last(mix(m.first(x))), first=nn.Linear(width, 6), last=nn.Linear(6, 3))


def _of_rows(*rows: Sequence[float]) -> Callable[[], list[Step]]:
    """Samples of these numbers."""
    x = torch.tensor(rows, dtype=torch.float64)
    return lambda: [step({"x": x, "scale": scales(len(x))})]


def _column(*values: float) -> Callable[[], list[Step]]:
    return _of_rows(*[[v] * 6 for v in values])


def _same_ids(value: int) -> Callable[[], list[Step]]:
    return lambda: [step({"ids": torch.full((4, 3), value), "scale": scales(4)})]


def _ids(*shape: int) -> Callable[[], list[Step]]:
    return lambda: [step({"ids": torch.randint(0, 11, shape), "scale": scales(shape[0])})]


def _embedding(mix: Mix) -> Callable[[], nn.Module]:
    return lambda: Graph(lambda m, ids: m.last(mix(m.first(ids))), first=nn.Embedding(11, 6), last=nn.Linear(6, 3))


def _centered(h: torch.Tensor) -> torch.Tensor:
    return h - h.mean(0)


def _weakly(size: float) -> Mix:
    return lambda h: h - size * h.mean(0)


def _detached(h: torch.Tensor) -> torch.Tensor:
    return (h - h.mean(0).detach()) / h.std(0, unbiased=False).detach().clamp(min=0.1)


def _neighbours(distance: int) -> Mix:
    """Only samples i and i + distance mix."""

    def mix(h: torch.Tensor) -> torch.Tensor:
        if len(h) <= distance:
            return h
        return torch.cat([h[:distance] + h[distance : 2 * distance].sum(0), h[distance:]])

    return mix


def _first_and_last(h: torch.Tensor) -> torch.Tensor:
    return h if len(h) < 2 else torch.cat([h[:1] + h[-1:], h[1:]])


def _last_two(h: torch.Tensor) -> torch.Tensor:
    return h if len(h) < 2 else torch.cat([h[:-1], h[-1:] * h[-2:-1]])


def _from_size(size: int) -> Mix:
    return lambda h: h - h.mean(0) if len(h) >= size else h


def _with_capacity(h: torch.Tensor) -> torch.Tensor:
    """Each of two experts takes two samples; later ones are dropped."""
    chosen = h[..., :2].sum(tuple(range(1, h.dim() - 1))).argmax(-1) if h.dim() > 2 else h[:, :2].argmax(-1)
    kept = torch.zeros(len(h), dtype=h.dtype)
    for expert in (0, 1):
        kept[(chosen == expert).nonzero().flatten()[:2]] = 1
    return h * kept.view(-1, *[1] * (h.dim() - 1))


def _if_any(h: torch.Tensor) -> torch.Tensor:
    """One sample decides what happens to all."""
    return h * 0.1 if bool((h.detach().abs() > 1).any()) else h


def _largest_wins(h: torch.Tensor) -> torch.Tensor:
    best = h.detach().flatten(1).norm(dim=1).argmax()
    return h + 0.5 * h[best]


@changed_in_backward
def _centered_in_backward(g: torch.Tensor) -> torch.Tensor:
    return g - g.mean(0)


def _by_size_in_backward(share: float) -> Mix:
    return changed_in_backward(lambda g: g * (1 + share * len(g)))


@changed_in_backward
def _limited_in_backward(g: torch.Tensor) -> torch.Tensor:
    """Limits the gradient of the whole batch, as some recipes do inside of models."""
    return g / g.norm().clamp(min=1.0)


@changed_in_backward
def _limited_if_large(g: torch.Tensor) -> torch.Tensor:
    """Limits the gradient of the whole batch where it is larger than those that a proof draws."""
    return g * (50 / g.norm().clamp(min=50))


MIXES: dict[str, Mix] = {
    "centered": _centered,
    "weakly_1e-3": _weakly(1e-3),
    "weakly_1e-6": _weakly(1e-6),
    "weakly_1e-9": _weakly(1e-9),
    "detached_statistics": _detached,
    "neighbour_1": _neighbours(1),
    "neighbour_4": _neighbours(4),
    "first_and_last": _first_and_last,
    "last_two": _last_two,
    "from_size_9": _from_size(9),
    "softmax": lambda h: h * h.softmax(0),
    "largest_value": lambda h: h / (h.abs().max() + 1),
    "norm_of_the_batch": lambda h: h / h.norm().clamp(min=1),
    "cumulative": lambda h: h.cumsum(0),
    "rolled": lambda h: h.roll(1, 0),
    "flipped": lambda h: h + h.flip(0),
    "attention": lambda h: h + (h @ h.T).softmax(-1) @ h,
    "median": lambda h: h - h.detach().median(0).values,
    "capacity": _with_capacity,
    "if_any": _if_any,
    "largest_wins": _largest_wins,
    "number_of_samples": lambda h: h / len(h),
    "sorted": lambda h: h.sort(0).values,
    "ranks": lambda h: h * h.detach().argsort(0).argsort(0).to(h.dtype),
    "in_backward": _centered_in_backward,
    "scale_in_backward": _limited_in_backward,
    "shared_noise": lambda h: h + h.detach()[0],
    "statistics_of_the_others": lambda h: h + 1e-2 * (h.sum(0, keepdim=True) - h).detach().tanh(),
}


def _late(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0) if m.steps_done > 3 else h)


def _count_steps(model: Any, optimizer: Any) -> None:
    for module in model.modules():
        if isinstance(module, Graph):
            module.steps_done += 1


def _lately() -> nn.Module:
    return Graph(_late, first=nn.Linear(6, 6), last=nn.Linear(6, 3), steps_done=0)


def _over_batch_norm_like(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A normalization of the user's own, which training mode switches on."""
    h = m.first(x)
    if m.training:
        h = (h - h.mean((0, 1))) / (h.var((0, 1), unbiased=False) + 1e-5).sqrt()
    return m.last(h)


def _images(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last((h - h.mean((0, 2, 3), keepdim=True)).flatten(1))


def _large_others() -> Batch:
    batch = floats(6, 6)
    batch["x"][::2] *= 1e6
    return batch


PROGRAMS = [
    *(Program(f"mix_{name}", _graph(mix), of_shape(9, 6), "refused") for name, mix in MIXES.items()),
    *(
        Program(f"mix_{name}_in_size_8", _graph(MIXES[name]), of_shape(8, 6), "refused")
        for name in ("centered", "neighbour_4", "first_and_last", "weakly_1e-6")
    ),
    *(
        Program(f"mix_{name}_two_passes", _graph(MIXES[name]), of_shape(9, 6), "refused", settings={"passes": 2})
        for name in ("centered", "weakly_1e-6", "detached_statistics", "in_backward")
    ),
    Program("mix_inputs_8_5_1", _graph(_centered), _column(8, 5, 1), "refused"),
    Program("mix_inputs_4_5_2", _graph(_centered), _column(4, 5, 2), "refused"),
    Program("mix_inputs_equal", _graph(_centered), _column(3, 3, 3, 3), "refused"),
    Program("mix_inputs_zero", _graph(_centered), _column(0, 0, 0, 0), "refused"),
    Program("mix_inputs_opposite", _graph(_centered), _column(2, -2, 2, -2), "refused"),
    Program("mix_two_samples", _graph(_centered), of_shape(2, 6), "refused"),
    Program("mix_ids_8", _embedding(_centered), _same_ids(8), "refused"),
    Program("mix_ids", _embedding(_centered), _ids(4, 3), "refused"),
    Program("mix_ids_of_one_token", _embedding(_centered), _ids(4, 1), "refused"),
    *(
        Program(
            f"mix_{name}_bf16", _graph(_weakly(share)), of_shape(8, 6), "refused", settings={"dtype": torch.bfloat16}
        )
        for name, share in (("all", 1.0), ("0.3", 0.3))
    ),
    *(
        Program(f"mix_{name}_fp32", _graph(MIXES[name]), of_shape(8, 6), "refused", settings={"dtype": torch.float32})
        for name in ("centered", "weakly_1e-3", "detached_statistics", "neighbour_4")
    ),
    Program("mix_by_size_in_backward", _graph(_by_size_in_backward(1e-6)), of_shape(8, 6), "refused"),
    Program(
        "mix_by_size_in_backward_fp32",
        _graph(_by_size_in_backward(0.01)),
        of_shape(8, 6),
        "refused",
        settings={"dtype": torch.float32},
    ),
    Program("mix_after_step_3", _lately, lambda: [step(floats(5, 6), _count_steps) for _ in range(6)], "refused"),
    Program(
        "mix_size_grows_to_9", _graph(_from_size(9)), several(lambda: floats(4, 6), lambda: floats(9, 6)), "refused"
    ),
    Program(
        "mix_own_batch_norm",
        lambda: Graph(_over_batch_norm_like, first=nn.Linear(6, 6), last=nn.Linear(6, 3)),
        of_shape(5, 4, 6),
        "refused",
    ),
    Program(
        "mix_images",
        lambda: Graph(_images, first=nn.Conv2d(2, 3, 3), last=nn.Linear(12, 3)),
        of_shape(4, 2, 4, 4),
        "refused",
    ),
    Program("mix_large_gradients", _graph(_limited_if_large), of_shape(5, 6), "refused"),
    Program("mix_large_others", _graph(_weakly(1e-6)), several(_large_others), "refused"),
]
