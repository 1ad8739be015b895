# SPDX-License-Identifier: Apache-2.0
"""Outputs that hide what samples do to one another: losses inside the model, objects, attributes, globals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.exactness.judge import Batch, Step, step
from tests.exactness.program import (
    Graph,
    Program,
    floats,
    inner,
    inputs,
    of_shape,
    per_sample,
    ragged_ids,
    scales,
    several,
)

_SEEN: list[torch.Tensor] = []


@dataclass
class Result:
    """An object that no pytree knows."""

    logits: torch.Tensor
    others: Any = None


class _Cache:
    """Keeps keys, as those of transformers do."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.keys)


def _cached_keys(m: Any, h: torch.Tensor, cache: _Cache | None = None) -> torch.Tensor:
    keys = h @ m.w  # a layer's own matrix: its forward is repeated
    if cache is not None:
        cache.keys.append(keys)
    return torch.tanh(keys)


def _with_cache(m: Any, x: torch.Tensor) -> dict[str, Any]:
    cache = _Cache()
    return {"logits": m.last(m.attention(m.first(x), cache=cache)), "past_key_values": cache}


def _attention() -> nn.Module:
    return Graph(_cached_keys, w=nn.Parameter(torch.randn(6, 6)))


def _of_cache(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"])["past_key_values"].keys[0], batch)


def _pair(**members: Any) -> dict[str, Any]:
    return {"first": nn.Linear(6, 6), "last": nn.Linear(6, 3), **members}


def _graph(function: Callable[..., Any], **members: Any) -> Callable[[], nn.Module]:
    return lambda: Graph(function, **_pair(**members))


def _mixed(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0))


def _plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x)))


def _with_number(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one number of the parameters for all samples, too, as a flow's log-determinant."""
    return _plain(m, x), m.first.weight.square().sum().expand(len(x))


def _less_the_number(model: Any, batch: Batch) -> torch.Tensor:
    output, number = model(*inputs(batch))
    return per_sample(output, batch) - number * batch["scale"]


def _scalar(model: Any, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(*inputs(batch))
    return out


# --- losses in the model ---
def _contrastive(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = functional.normalize(_plain(m, x), dim=-1), functional.normalize(m.last(m.first(x.flip(-1))), dim=-1)
    return functional.cross_entropy(5 * a @ b.T, torch.arange(len(x)))


def _router_loss(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As in Switch Transformers: the share of tokens times the mean probability, over the whole batch."""
    p = m.last(m.first(x)).softmax(-1).flatten(0, -2)
    share = functional.one_hot(p.argmax(-1), 3).to(p.dtype).mean(0)
    return 3 * (share * p.mean(0)).sum() + p.square().mean()


def _mean_over_valid(m: Any, ids: torch.Tensor) -> torch.Tensor:
    labels = torch.where(ids == 0, -100, ids % 3)
    return functional.cross_entropy(m.last(m.first(ids)).transpose(1, 2), labels)


def _token_mean(m: Any, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(m.last(m.first(ids)).transpose(1, 2), ids % 3)


def _embedded(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Graph(function, first=nn.Embedding(11, 6), last=nn.Linear(6, 3))


def _loss_and_logits(m: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = m.last(m.first(ids))
    labels = torch.where(ids == 0, -100, ids % 3)
    return {"loss": functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


_RAGGED = several(lambda: ragged_ids((5, 5, 5, 5)), lambda: ragged_ids((2, 5, 1, 4)))
_EQUAL = several(lambda: ragged_ids((5, 5, 5, 5)), lambda: ragged_ids((5, 5, 5, 5)))


def _variance_penalty(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = _plain(m, x)
    return h.square().sum() + h.mean(0).square().sum()


# --- auxiliary losses beside the output ---
def _aux_in_attribute(mix: bool) -> Callable[..., torch.Tensor]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.first(x))
        m.aux = h.mean(0).square().sum() if mix else h.square().sum()
        return m.last(h)

    return forward


def _with_attribute(model: Any, batch: Batch) -> torch.Tensor:
    output = model(batch["x"])
    return per_sample(output, batch).sum() + 5 * inner(model).aux


def _aux_in_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(m.first(x))
    _SEEN.append(h.mean(0).square().sum())
    return m.last(h)


def _with_list(model: Any, batch: Batch) -> torch.Tensor:
    _SEEN.clear()
    output = model(batch["x"])
    return per_sample(output, batch).sum() + 5 * _SEEN[-1]


def _aux_by_hook() -> nn.Module:
    model = Graph(_plain, **_pair())

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        _SEEN.append(output.mean(0).square().sum())

    model.first.register_forward_hook(keep)
    return model


def _features_by_hook() -> nn.Module:
    """A hook that keeps features, which enter the loss sample by sample."""
    model = Graph(_plain, **_pair())
    model.first.register_forward_hook(lambda module, args, output: _SEEN.append(output))
    return model


def _with_features(model: Any, batch: Batch) -> torch.Tensor:
    _SEEN.clear()
    output = model(batch["x"])
    return per_sample(output, batch) + _SEEN[-1].square().sum(1)


def _weight_penalty(model: Any, batch: Batch) -> torch.Tensor:
    """Weight decay in the loss: a gradient that belongs to no sample."""
    output = model(batch["x"])
    return per_sample(output, batch).sum() + 50 * inner(model).first.weight.square().sum()


# --- objects ---
def _object_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, x: Result(function(m, x))


def _of_object(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"]).logits, batch)


def _nested(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, x: {"a": [(function(m, x),)], "b": None, "c": "text"}


def _of_nested(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"])["a"][0][0], batch)


def _two_outputs(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = m.first(x)
    return m.last(h), h - h.mean(0)


def _first_output(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"])[0], batch)


def _both_outputs(model: Any, batch: Batch) -> torch.Tensor:
    a, b = model(batch["x"])
    return per_sample(a, batch) + per_sample(b, batch)


def _separate_outputs(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = m.first(x)
    return m.last(h), torch.tanh(h)


# --- the batch in another dimension ---
def _time_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x.transpose(0, 1))))


def _time_first_losses(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"]).transpose(0, 1), batch)


def _inputs_time_first_losses(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"].transpose(0, 1)).transpose(0, 1), batch)


def _square(size: int, tokens: int) -> Callable[[], list[Step]]:
    return lambda: [step(floats(size, tokens, 6)) for _ in range(2)]


def _unit_scales(*shape: int) -> Callable[[], list[Step]]:
    return lambda: [step({**floats(*shape), "scale": scales(shape[0]) * 0 + 1})]


_MEAN = {"reduction": "mean"}
PROGRAMS = [
    Program("outputs_contrastive", _graph(_contrastive), of_shape(5, 6), "refused", _scalar, _MEAN),
    Program("outputs_router_loss", _graph(_router_loss), of_shape(5, 4, 6), "refused", _scalar, _MEAN),
    Program("outputs_mean_over_valid", _embedded(_mean_over_valid), _RAGGED, "refused", _scalar, _MEAN),
    Program("outputs_mean_over_equal_counts", _embedded(_token_mean), _EQUAL, "exact", _scalar, _MEAN),
    Program("outputs_variance_penalty", _graph(_variance_penalty), of_shape(5, 6), "refused", _scalar),
    Program("outputs_expanded", _graph(_with_number), of_shape(5, 6, count=2), "exact", _less_the_number),
    Program("outputs_sum", _graph(lambda m, x: _plain(m, x).square().sum()), of_shape(5, 6), "exact", _scalar),
    Program("outputs_mean", _graph(lambda m, x: _plain(m, x).square().mean()), of_shape(5, 6), "exact", _scalar, _MEAN),
    Program(
        "outputs_square_of_the_mean",
        _graph(lambda m, x: _plain(m, x).sum(-1).mean().square()),
        of_shape(5, 6),
        "refused",
        _scalar,
        _MEAN,
    ),
    Program(
        "outputs_largest_loss",
        _graph(lambda m, x: _plain(m, x).square().sum(-1).max()),
        of_shape(5, 6),
        "refused",
        _scalar,
    ),
    Program(
        "outputs_loss_beside_logits",
        _embedded(_loss_and_logits),
        _RAGGED,
        "refused",
        lambda model, batch: model(*inputs(batch))["loss"],
        _MEAN,
    ),
    Program(
        "outputs_logits_beside_loss",
        _embedded(_loss_and_logits),
        _RAGGED,
        "either",
        lambda model, batch: per_sample(model(*inputs(batch))["logits"], batch),
    ),
    Program("outputs_aux_mixes", _graph(_aux_in_attribute(True)), of_shape(5, 6), "refused", _with_attribute),
    Program("outputs_aux_sums", _graph(_aux_in_attribute(False)), of_shape(5, 6), "either", _with_attribute),
    Program("outputs_aux_in_list", _graph(_aux_in_list), of_shape(5, 6), "refused", _with_list),
    Program("outputs_aux_by_hook", _aux_by_hook, of_shape(5, 6), "refused", _with_list),
    Program("outputs_features_by_hook", _features_by_hook, of_shape(5, 6), "either", _with_features),
    Program("outputs_weight_penalty", _graph(_plain), of_shape(5, 6), "either", _weight_penalty),
    Program("outputs_object_mixes", _graph(_object_of(_mixed)), of_shape(5, 6), "refused", _of_object),
    Program("outputs_object", _graph(_object_of(_plain)), of_shape(5, 6), "exact", _of_object),
    *(
        Program(
            f"outputs_cache_of_keys{name}",
            lambda: Graph(_with_cache, **_pair(attention=_attention())),
            of_shape(5, 6),
            allowed,  # type: ignore[arg-type]
            losses,
        )
        for name, allowed, losses in (
            ("", "exact", lambda model, batch: per_sample(model(batch["x"])["logits"], batch)),
            ("_in_the_loss", "refused", _of_cache),
        )
    ),
    Program("outputs_nested_mixes", _graph(_nested(_mixed)), of_shape(5, 6), "refused", _of_nested),
    Program("outputs_nested", _graph(_nested(_plain)), of_shape(5, 6), "exact", _of_nested),
    Program("outputs_second_mixes", _graph(_two_outputs), of_shape(5, 6), "refused", _both_outputs),
    Program("outputs_second_mixes_unused", _graph(_two_outputs), of_shape(5, 6), "either", _first_output),
    Program("outputs_two", _graph(_separate_outputs), of_shape(5, 6), "exact", _both_outputs),
    *(
        Program(
            f"outputs_time_first_{size}_{tokens}_passes_{passes}",
            _graph(_time_first),
            _square(size, tokens),
            "either",
            _time_first_losses,
            {"passes": passes},
        )
        for size, tokens in ((4, 4), (4, 5), (5, 4))
        for passes in (1, 2)
    ),
    *(
        Program(
            f"outputs_recurrent_time_first_{size}_{tokens}",
            lambda: Graph(lambda m, x: m.last(m.first(x)[0]), first=nn.GRU(6, 6), last=nn.Linear(6, 3)),
            _square(size, tokens),
            "refused",
            _inputs_time_first_losses,
        )
        for size, tokens in ((4, 4), (4, 5))
    ),
    Program(
        "outputs_without_samples",
        _graph(lambda m, x: _plain(m, x).mean(0)),
        of_shape(5, 6),
        "refused",
        lambda model, batch: model(batch["x"]).square().sum(),
        _MEAN,
    ),
    Program(
        "outputs_without_samples_averaged",
        _graph(lambda m, x: _plain(m, x).square().mean(0)),
        of_shape(5, 6),
        "exact",
        lambda model, batch: model(batch["x"]).sum(),
        _MEAN,
    ),
    Program(
        "outputs_tokens_in_the_place_of_samples",
        _graph(lambda m, x: m.last(torch.tanh(m.first(x)).transpose(0, 1)).mean(1)),
        of_shape(6, 6, 6),
        "refused",
        lambda model, batch: model(batch["x"]).square().sum(),
    ),
    Program(
        "outputs_mean_of_mixed",
        _graph(lambda m, x: _mixed(m, x).square().mean()),
        _unit_scales(6, 6),
        "refused",
        _scalar,
        _MEAN,
    ),
]
