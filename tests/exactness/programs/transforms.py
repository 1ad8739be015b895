# SPDX-License-Identifier: Apache-2.0
"""Derivatives and transforms of torch.func in programs, numbers of the whole batch, and rows that are not samples."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.exactness.judge import Batch
from tests.exactness.program import Graph, Program, loss_of_the_model, losses_of_outputs, of_shape, per_sample


def _pair() -> dict[str, nn.Module]:
    return {"first": nn.Linear(6, 6), "last": nn.Linear(6, 3)}


def _graph(forward: Callable[..., Any], **members: Any) -> Callable[[], nn.Module]:
    return lambda: Graph(forward, **_pair(), **{name: make() for name, make in members.items()})


def _parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(*shape))


# --- derivatives and transforms ---
def _gradient_penalty(model: Any, batch: Batch) -> torch.Tensor:
    x = batch["x"].clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.tanh().sum(), x, create_graph=True)
    return per_sample(output, batch) + gradient.square().sum(1)


def _plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x)))


def _forces(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    energy = m.last(torch.tanh(m.first(x))).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def _with_other_parameters(m: Any, x: torch.Tensor) -> torch.Tensor:
    doubled = {name: 2 * p for name, p in m.first.named_parameters()}
    return m.last(torch.func.functional_call(m.first, doubled, (x,)))


def _by_sample(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: m.last(torch.tanh(m.first(row))))(x)


def _directional(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda y: m.last(torch.tanh(m.first(y))), (x,), (torch.ones_like(x),))[1]


# --- numbers of the whole batch ---
def _until_small(m: Any, x: torch.Tensor) -> torch.Tensor:
    while float(x.detach().abs().max()) > 0.6:
        x = 0.8 * torch.tanh(m.first(x))
    return m.last(x)


def _until_converged(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x, before = torch.tanh(0.3 * m.first(x)), x
        if float((x - before).detach().norm()) < 0.5:
            break
    return m.last(x)


def _scaled_by_item(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x)) / x.abs().max().item())


def _quantized(h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return h + ((h / scale).round() * scale - h).detach()


def _quantized_together(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(_quantized(h, h.detach().abs().max() / 127))


def _quantized_by_row(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(_quantized(h, h.detach().abs().amax(1, keepdim=True) / 127))


def _vector_quantized(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = m.first(x)
    nearest = m.codes[torch.cdist(h, m.codes).argmin(1)]
    return m.last(h + (nearest - h).detach()), (nearest - h.detach()).square().sum(1)


def _vector_quantized_mean(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output, distances = _vector_quantized(m, x)
    return output, distances.mean()


def _sum_of_outputs(model: Any, batch: Batch) -> torch.Tensor:
    output, more = model(batch["x"])
    return per_sample(output, batch) + more


# --- rows that are not samples ---
def _prototypes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(m.last(m.first(x)), m.last(m.first(m.prototypes)))


def _weights_from_a_layer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x) @ m.first(m.z)))


def _augmented(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.last(torch.tanh(m.first(torch.cat([x, 2 * x]))))
    return h[: len(x)] - h[len(x) :]


def _repeated_samples(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x.repeat(3, 1)))).view(3, len(x), -1).mean(0)


def _interleaved(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(torch.stack([x, -x], 1).flatten(0, 1)))).view(len(x), 2, -1).sum(1)


def _attends_to_samples(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x).transpose(0, 1)  # [T, B, width]
    return m.last((torch.softmax(h @ h.transpose(1, 2), -1) @ h).transpose(0, 1))


def _tokens_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x.transpose(0, 1)))).transpose(0, 1)


def _weight_noise(m: Any, x: torch.Tensor) -> torch.Tensor:
    weight = m.mean + torch.randn_like(m.mean) * functional.softplus(m.width)
    return m.last(functional.linear(m.first(x), weight))


def _straight_through(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last((h.round() - h).detach() + h)


def _chosen_by_row(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(torch.where(x.sum(1, keepdim=True) > 0, torch.tanh(h), h))


def _chosen_by_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(torch.tanh(h) if x.sum() > 0 else h)


def _last_row(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x).clone()
    h[-1] = 1.0001 * h[-1]
    return m.last(h)


def _weighted_by_index(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x)) * torch.arange(1, len(x) + 1, dtype=x.dtype).unsqueeze(1)


def _labelled_by_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(m.last(m.first(x)), torch.arange(len(x)) % 3, reduction="sum")


def _halved_by_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The random numbers keep the batch whole where gradients are explained by outputs."""
    h = functional.dropout(m.first(x), 0.1)
    h[:1].mul_(0.5)
    return m.last(h)


def _in_threads(run: Callable[[float], Any]) -> list[Any]:
    """Runs a function twice, at the same time."""
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda factor: (together.wait(9), run(factor))[1], (1.0, 2.0)))


def _called_by_threads(model: Any, batch: Batch) -> torch.Tensor:
    return sum(_in_threads(lambda factor: per_sample(model(factor * batch["x"]), batch)))  # type: ignore[arg-type]


def _slowly(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(m.first(x))
    time.sleep(0.05)
    return m.last(h)


def _layers_in_threads(m: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(_in_threads(lambda factor: m.last(torch.tanh(m.first(factor * x)))))  # type: ignore[arg-type]


def _in_func_grad(model: Any, batch: Batch) -> torch.Tensor:
    losses = per_sample(model(batch["x"]), batch)
    of_inputs = torch.func.grad(lambda x: model(x).sum())(batch["x"])
    return losses + of_inputs.detach().sum(1)


def _reparametrized(change: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(change(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


def _program(
    name: str,
    build: Callable[[], nn.Module],
    allowed: Any,
    *shape: int,
    losses: Any = losses_of_outputs,
    **settings: Any,
) -> Program:
    return Program(f"transform_{name}", build, of_shape(*(shape or (5, 6)), count=2), allowed, losses, settings)


PROGRAMS = [
    _program("gradient_penalty", _graph(_plain), "refused", losses=_gradient_penalty),
    _program("forces", _graph(_forces), "refused"),
    _program("functional_call", _graph(_with_other_parameters), "refused"),
    _program("vmap", _graph(_by_sample), "refused"),
    _program("straight_through", _graph(_straight_through), "exact"),
    _program("chosen_by_row", _graph(_chosen_by_row), "exact"),
    _program("chosen_by_batch", _graph(_chosen_by_batch), "refused"),
    _program("last_row_weakly", _graph(_last_row), "refused"),
    _program("weighted_by_index", _graph(_weighted_by_index), "refused"),
    *(
        _program(f"reparametrized_{each.__name__}", _reparametrized(each), "exact")
        for each in (parametrizations.weight_norm, parametrizations.orthogonal)
    ),
    _program("labelled_by_place", _graph(_labelled_by_place), "refused", losses=loss_of_the_model),
    _program("halved_by_place", _graph(_halved_by_place), "refused", is_random=True),
    _program("called_by_threads", _graph(_slowly), "refused", losses=_called_by_threads),
    _program("layers_in_threads", _graph(_layers_in_threads), "refused"),
    _program("func_grad_outside", _graph(_plain), "refused", losses=_in_func_grad),
    _program("jvp", _graph(_directional), "refused"),
    _program("torchscript", lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))), "refused"),
    _program(
        "torchscript_without_parameters",
        lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.trace(nn.Tanh(), torch.randn(5, 6)), nn.Linear(6, 3)),
        "refused",
    ),
    _program("until_small", _graph(_until_small), "refused"),
    _program("until_converged", _graph(_until_converged), "refused"),
    _program("scaled_by_item", _graph(_scaled_by_item), "refused"),
    _program("quantized_together", _graph(_quantized_together), "refused"),
    _program("quantized_by_row", _graph(_quantized_by_row), "exact"),
    _program("codes", _graph(_vector_quantized, codes=_parameter(4, 6)), "exact", losses=_sum_of_outputs),
    _program("codes_mean", _graph(_vector_quantized_mean, codes=_parameter(4, 6)), "refused", losses=_sum_of_outputs),
    _program("as_many_prototypes", _graph(_prototypes, prototypes=_parameter(5, 6)), "exact"),
    _program("weights_from_a_layer", _graph(_weights_from_a_layer, z=_parameter(6, 6)), "exact"),
    _program("augmented", _graph(_augmented), "exact"),
    _program("repeated_samples", _graph(_repeated_samples), "exact"),
    _program("interleaved", _graph(_interleaved), "exact"),
    _program("attends_to_samples", _graph(_attends_to_samples), "refused", 5, 5, 6),
    _program("tokens_first", _graph(_tokens_first), "exact", 5, 5, 6),
    _program(
        "weight_noise", _graph(_weight_noise, mean=_parameter(6, 6), width=_parameter(6, 6)), "exact", is_random=True
    ),
]
