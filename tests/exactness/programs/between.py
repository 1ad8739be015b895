# SPDX-License-Identifier: Apache-2.0
"""Programs that do something unusual between a forward, its backward and the step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import binary_cross_entropy, cross_entropy, mse_loss

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.errors import MemprofError
from tests.exactness.judge import Verdict
from tests.exactness.program import Graph, Program
from tests.exactness.tensors import gradient_of, norm_of, seed_all

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Body = Callable[[Any, torch.Tensor, Any], None]
"""Called with the model, a batch, and the optimizer; its backward passes are followed by a step."""


def _squares(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def _ordinary(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    _squares(model, x).backward()


def _by_hand(model: nn.Module, x: torch.Tensor, loss: Loss) -> list[torch.Tensor]:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for n in range(len(x)):
        model.zero_grad()
        loss(model, x[n : n + 1]).backward()
        gradients = [gradient_of(p) for p in model.parameters()]
        factor = min(1.0, 1 / (norm_of(gradients) + 1e-6))
        total = [a + factor * g for a, g in zip(total, gradients, strict=True)]
    return total


def _entropy(
    model: Any, x: torch.Tensor, ignored: torch.Tensor | None, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over labels of 0 to 5, five of each sample, that are not ignored."""
    labels = (x[:, :5] * 7).long().abs() % 6
    labels = labels if ignored is None else labels.masked_fill(ignored, -100)
    return cross_entropy(model(x).view(-1, 6), labels.flatten(), weight)


def _program(
    name: str,
    build: Callable[[], nn.Module],
    data: Callable[[], torch.Tensor],
    body: Body,
    sentence: str = "",
    loss: Loss = _squares,
    first: Body = _ordinary,
) -> Program:
    """A step whose gradients are explained by the outputs, and then one with `body`. The bound is 1.

    The second step must be refused with `sentence`, or be exact if there is none.
    """

    def run(seed: int) -> Verdict:
        seed_all(seed)
        model = build().double()
        by_hand, x = copy.deepcopy(model), data()
        module = GradSampleModuleFlashClip(model, loss_reduction="sum", max_grad_norm=1.0)
        optimizer = DPOptimizerFlashClip(
            torch.optim.SGD(model.parameters(), lr=0.0),
            module=module,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            loss_reduction="sum",
        )
        try:
            for each in (first, body):
                optimizer.zero_grad()
                each(module, x.clone(), optimizer)
                optimizer.step()
        except MemprofError as error:
            is_right = sentence in str(error)
            return Verdict("refused" if is_right else "wrong", 0.0, str(error))
        found = [gradient_of(p) for p in model.parameters()]
        expected = _by_hand(by_hand, x, loss)
        error = norm_of([a - b for a, b in zip(found, expected, strict=True)])
        return Verdict("exact" if error < 1e-6 else "wrong", error, f"{error:.3g} C off")

    return Program(f"between_{name}", build, list, "refused" if sentence else "exact", run=run)


# --- writes between backward and step ---
def _next_batch(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    """The next batch is read into the same tensor before the step."""
    _squares(model, x).backward()
    x.copy_(x.flip(0) + 1)


def _scaled_output(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    out = model(x)
    out.mul_(3)
    out.square().sum().backward()


def _perturbed(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Adversarial inputs, by gradients of the inputs alone."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(_squares(model, x), x)
    return (x + 0.1 * g.sign()).detach()


def _adversarial(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    _squares(model, _perturbed(model, x)).backward()


def _not_a_number(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    (model(x) * torch.tensor([torch.nan, 1, 1])).sum().backward()


def _in_eval_mode(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    model.eval()
    _squares(model, x).backward()


def _exchanged_weights(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    """Two layers get each other's weights between forward and backward."""
    loss = _squares(model, x)
    inner = model._module
    inner.a.weight, inner.b.weight = inner.b.weight, inner.a.weight
    loss.backward()


def _normalized_weight(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    loss = _squares(model, x)
    torch.nn.utils.parametrizations.weight_norm(model._module.a)
    loss.backward()


def _from_an_edge(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    loss = _squares(model, x)
    torch.autograd.backward([get_gradient_edge(loss)], [torch.ones_like(loss)])  # type: ignore[list-item]


def _frozen_within_a_step(model: Any, x: torch.Tensor, optimizer: Any) -> None:
    """Layer `b` is trained in the first of two physical batches alone."""
    optimizer.signal_skip_step(True)
    _ordinary(model, x, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    model.b.requires_grad_(False)
    _ordinary(model, x, optimizer)


class _WritesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.mul_(0.5)


def _with_writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Layer `b` gets the gradient that the other branch overwrites afterwards."""
    return m.last(_WritesItsGradient.apply(torch.tanh(m.a(x))) + m.b(x))


def _numbers() -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64)


def _ids() -> torch.Tensor:
    return torch.randint(0, 50, (5, 4))


def _wide() -> nn.Module:
    return nn.Linear(6, 30)


def _tied() -> nn.Module:
    return Graph(lambda m, x: m.a(x) + torch.tanh(m.a(x)), a=nn.Linear(6, 30))


def _branches() -> nn.Module:
    return Graph(_with_writes, a=nn.Linear(6, 6), b=nn.Linear(6, 6), last=nn.Linear(6, 3))


def _pair() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def _repeated() -> nn.Module:
    """A parameter beside the layers."""
    return Graph(lambda m, x: m.a(x) * m.w, a=nn.Linear(6, 3), w=nn.Parameter(torch.ones(3)))


def _averaged() -> nn.Module:
    """Its outputs have no dimension for samples."""
    return Graph(lambda m, x: torch.tanh(m.a(x)).mean(0), a=nn.Linear(6, 3))


def _backward_of(loss: Loss) -> Body:
    return lambda model, x, optimizer: loss(model, x).backward()  # type: ignore[no-untyped-call]


# Losses of programs that declare a sum: what builds the model, the sum, the backward, and the sentence of a refusal.
_A_MEAN = "the loss is a mean over the samples, but loss_reduction='sum'"
_LOSSES: dict[str, tuple[Callable[[], nn.Module], Loss, Body, str]] = {
    "mean": (_wide, _squares, _backward_of(lambda m, x: m(x).square().sum(1).mean()), _A_MEAN),
    "mean_of_four_batches": (_wide, _squares, _backward_of(lambda m, x: mse_loss(m(x), x.repeat(1, 5)) / 4), _A_MEAN),
    "sum_and_mean": (_wide, _squares, _backward_of(lambda m, x: (lambda h: h.sum() + h.mean())(m(x))), _A_MEAN),
    "mean_in_the_model": (
        lambda: Graph(lambda m, x: mse_loss(m.a(x), x[:, :3]), a=nn.Linear(6, 3)),
        lambda m, x: m(x),
        _backward_of(lambda m, x: m(x)),
        _A_MEAN,
    ),
    "mean_times_batch": (_wide, _squares, _backward_of(lambda m, x: m(x).square().sum(1).mean() * len(x)), ""),
    "mean_of_each_sample": (
        _wide,
        lambda m, x: m(x).square().mean(1).sum(),
        _backward_of(lambda m, x: m(x).square().mean(1).sum()),
        "",
    ),
    "mean_of_sums": (
        _wide,
        lambda m, x: m(x).square().sum() / 30,
        _backward_of(lambda m, x: m(x).square().sum(0).mean()),
        "",
    ),
}
_MIXED = "is not a sum, or a mean, of terms of one sample each"
_LOSSES |= {
    "of_pairs": (_wide, _squares, _backward_of(lambda m, x: (lambda h: (h @ h.T).square().sum())(m(x))), _MIXED),
    "root_of_the_sum": (_wide, _squares, _backward_of(lambda m, x: m(x).square().sum().sqrt()), _MIXED),
    "by_the_largest": (
        _wide,
        _squares,
        _backward_of(lambda m, x: (lambda h: h.square().sum() / h.detach().max())(m(x))),
        _MIXED,
    ),
    "of_probabilities": (
        lambda: nn.Sequential(_wide(), nn.Sigmoid()),
        _squares,
        _backward_of(lambda m, x: (lambda p: binary_cross_entropy(p, p.detach().round()) * p.detach().sum())(m(x))),
        _MIXED,
    ),
    "of_valid_labels": (_wide, _squares, _backward_of(lambda m, x: _entropy(m, x, x[:, :5] > 1)), _MIXED),
    "of_weighted_labels": (
        _wide,
        _squares,
        _backward_of(lambda m, x: _entropy(m, x, None, torch.arange(1.0, 7.0, dtype=x.dtype))),
        _MIXED,
    ),
    "of_as_many_labels_of_each": (
        _wide,
        lambda m, x: _entropy(m, x, torch.arange(5) == 4),
        _backward_of(lambda m, x: _entropy(m, x, torch.arange(5) == 4) * len(x)),
        "",
    ),
}
_WRITTEN = "was written to in place after its backward"
PROGRAMS = [
    _program("nothing", _wide, _numbers, _ordinary),
    _program("input_overwritten", _wide, _numbers, _next_batch, _WRITTEN),
    _program("ids_overwritten", lambda: nn.Embedding(60, 6), _ids, _next_batch, _WRITTEN),
    _program("input_of_two_uses_overwritten", _tied, _numbers, _next_batch, _WRITTEN),
    _program("gradient_overwritten", _branches, _numbers, _ordinary, _WRITTEN),
    _program(
        "output_scaled", _wide, _numbers, _scaled_output, loss=lambda m, x: 9 * _squares(m, x), first=_scaled_output
    ),
    *(
        _program(
            f"adversarial_inputs_{name}", build, _numbers, _adversarial, loss=lambda m, x: _squares(m, _perturbed(m, x))
        )
        for name, build in (("layers", _pair), ("repeated", _repeated))
    ),
    _program(
        "nan_in_outputs_without_samples",
        _averaged,
        _numbers,
        _not_a_number,
        "of the batch is not finite",
        first=lambda model, x, optimizer: model(x).sum().backward(),
    ),
    _program(
        "frozen_within_a_step",
        lambda: Graph(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(6, 3), b=nn.Linear(6, 3)),
        _numbers,
        _frozen_within_a_step,
        "was trained in earlier physical batches of this step",
    ),
    *(
        _program(f"loss_{name}", build, _numbers, body, sentence, loss, body)
        for name, (build, loss, body, sentence) in _LOSSES.items()
    ),
    *(
        _program(
            name,
            lambda: Graph(lambda m, x: m.a(torch.tanh(m.b(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)),
            _numbers,
            body,
            "was added, removed or replaced between its forward and backward()",
        )
        for name, body in (("exchanged_weights", _exchanged_weights), ("normalized_weight", _normalized_weight))
    ),
    _program("from_an_edge", _pair, _numbers, _from_an_edge, first=_from_an_edge),
    _program("after_eval", _pair, _numbers, _in_eval_mode, "eval mode"),
]
