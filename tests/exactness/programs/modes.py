# SPDX-License-Identifier: Apache-2.0
"""Modes that change after a model was made private."""

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.judge import Batch, Step, step
from tests.exactness.program import Graph, Program, floats, inner, losses_of_outputs, of_shape, several


def _with_norm(norm: Callable[[], nn.Module], is_frozen: bool = True) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), norm(), nn.Linear(6, 3)).train()
        model[1].eval()
        if is_frozen:
            model[1].requires_grad_(False)
        with torch.no_grad():
            for buffer in model[1].buffers():
                if buffer.is_floating_point():
                    buffer.uniform_(0.5, 2)
        return model

    return build


class _OwnBatchNorm(nn.BatchNorm1d):
    """A BatchNorm of which some parts, such as batch statistics, are switched off by its own forward."""

    of_batch = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        center = x.mean(0) if self.of_batch else self.running_mean
        return (x - center) * self.weight + self.bias


class _CentersBatchNorm(_OwnBatchNorm):
    of_batch = True


def _validate(model: Any, optimizer: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, 6, dtype=next(model.parameters()).dtype))
    model.train()


def _train(model: Any, optimizer: Any) -> None:
    model.train()


def _train_norm(model: Any, optimizer: Any) -> None:
    inner(model)[1].train()


def _eval(model: Any, optimizer: Any) -> None:
    model.eval()


def _validate_and_freeze(model: Any, optimizer: Any) -> None:
    _validate(model, optimizer)
    inner(model)[1].eval()


def _validate_with_grad(model: Any, optimizer: Any) -> None:
    """A validation of another size that does not switch gradients off, nor goes backward."""
    model.eval()
    model(torch.ones(2, 6, dtype=next(model.parameters()).dtype))
    model.train()


def _images(count: int = 3) -> Callable[[], list[Step]]:
    return of_shape(5, 6, count=count)


def _own_mode(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0) if m.centers else h)


def _mixes_in_training(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.part(m.first(x))
    return m.last(h - h.mean(0) if m.part.training else h)


def _train_part(model: Any, optimizer: Any) -> None:
    inner(model).part.train()


def _center(model: Any, optimizer: Any) -> None:
    inner(model).centers = True


def _double(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(m.first(h) if m.is_deep else h)


def _deepen(model: Any, optimizer: Any) -> None:
    inner(model).is_deep = True


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return m.last(torch.tanh(m.first(x))) * m.calls


def _counted_block(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return x * m.scale * m.calls


def _listed(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls.append(len(x))
    return m.last(torch.tanh(m.first(x))) * len(m.calls)


def _repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    for _ in range(m.times[0]):
        h = m.first(h)
    return m.last(h)


def _mixed_if_repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    for _ in range(m.times[0]):
        h = m.first(h - h.mean(0))
    return m.last(h)


def _repeat(model: Any, optimizer: Any) -> None:
    inner(model).times[0] = 2


def _under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0) if torch.is_autocast_enabled("cpu") else h)


def _autocast_of_5_tokens(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=batch["x"].shape[1] == 5):
        return losses_of_outputs(model, batch)


def _pair() -> dict[str, nn.Module]:
    return {"first": nn.Linear(6, 6), "last": nn.Linear(6, 3)}


def _instance_norm() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(1))


_CHANGES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "validated": (_validate, "refused"),
    "train_again": (_train, "refused"),
    "norm_trained": (_train_norm, "refused"),
    "validated_and_frozen": (_validate_and_freeze, "exact"),
}

PROGRAMS = [
    *(
        Program(
            f"modes_batch_norm_{name}",
            _with_norm(lambda: nn.BatchNorm1d(6)),
            of_shape(5, 6, count=3, change=change),
            allowed,
        )
        for name, (change, allowed) in _CHANGES.items()
    ),
    Program(
        "modes_batch_norm_trained_in_eval",
        _with_norm(lambda: nn.BatchNorm1d(6), is_frozen=False),
        of_shape(5, 6, count=2),
        "either",
    ),
    Program(
        "modes_batch_norm_trained_then_train",
        _with_norm(lambda: nn.BatchNorm1d(6), is_frozen=False),
        of_shape(5, 6, count=2, change=_train),
        "refused",
    ),
    *(
        Program(
            f"modes_batch_norm_of_own_forward_{name}",
            lambda norm=norm: nn.Sequential(nn.Linear(6, 6), norm(6), nn.Linear(6, 3)),  # type: ignore[misc]
            of_shape(5, 6, count=2),
            allowed,
        )
        for name, norm, allowed in (("frozen", _OwnBatchNorm, "exact"), ("mixes", _CentersBatchNorm, "refused"))
    ),
    Program("modes_instance_norm_train", _with_norm(_instance_norm), of_shape(5, 6, count=2, change=_train), "either"),
    Program(
        "modes_validation_of_another_size",
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        of_shape(5, 6, count=3, change=_validate),
        "exact",
    ),
    Program(
        "modes_validation_with_grad",
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        of_shape(5, 6, count=3, change=_validate_with_grad),
        "exact",
    ),
    Program(
        "modes_eval_while_training",
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        of_shape(5, 6, count=2, change=_eval),
        "either",
    ),
    Program(
        "modes_own_flag_mixes",
        lambda: Graph(_own_mode, **_pair(), centers=False),
        of_shape(5, 6, count=3, change=_center),
        "refused",
    ),
    Program(
        "modes_own_flag_deepens",
        lambda: Graph(_double, **_pair(), is_deep=False),
        of_shape(5, 6, count=3, change=_deepen),
        "exact",
    ),
    *(
        Program(
            f"modes_own_{name}",
            lambda forward=forward, calls=calls: Graph(forward, **_pair(), calls=calls()),
            of_shape(5, 6, count=3),
            "exact",
            settings={"is_random": True},
        )
        for name, forward, calls in (("count_of_calls", _counted, int), ("list_of_calls", _listed, list))
    ),
    Program(
        "modes_own_count_of_calls_repeated",
        lambda: nn.Sequential(
            nn.Linear(6, 6), Graph(_counted_block, scale=nn.Parameter(torch.ones(6)), calls=0), nn.Linear(6, 3)
        ),
        of_shape(5, 6, count=3),
        "exact",
        settings={"is_random": True},
    ),
    *(
        Program(
            f"modes_repeats_later_unchecked_{passes}",
            lambda: Graph(_repeated, **_pair(), times=array("q", [0])),  # which is part of no situation
            of_shape(5, 6, count=3, change=_repeat),
            "exact",
            settings={"passes": passes, "module_options": {"check": "off"}},
        )
        for passes in (1, 2)
    ),
    Program(
        "modes_part_trains_and_mixes",
        lambda: Graph(_mixes_in_training, **_pair(), part=nn.Identity().eval()),
        of_shape(5, 6, count=3, change=_train_part),
        "refused",
    ),
    Program(
        "modes_own_list_mixes",
        lambda: Graph(_mixed_if_repeated, **_pair(), times=[0]),
        of_shape(5, 6, count=3, change=_repeat),
        "refused",
    ),
    Program(
        "modes_autocast_mixes",
        lambda: Graph(_under_autocast, **_pair()),
        several(lambda: floats(6, 4, 6), lambda: floats(6, 5, 6)),
        "refused",
        _autocast_of_5_tokens,
        {"dtype": torch.float32},
    ),
    Program(
        "modes_dropout_switched_off",
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
        lambda: [
            step(floats(5, 6)),
            step(floats(5, 6), lambda model, optimizer: inner(model)[1].eval()),
            step(floats(5, 6), lambda model, optimizer: inner(model)[1].train()),
        ],
        "exact",
        settings={"is_random": True},
    ),
]
