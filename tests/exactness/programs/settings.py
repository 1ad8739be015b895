# SPDX-License-Identifier: Apache-2.0
"""Loops that set bounds and noise between steps, and that step what is not the private optimizer or its model."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from opacus.schedulers import ExponentialGradClip
from torch import nn

from tests.exactness.judge import Verdict
from tests.exactness.program import Program, of_shape
from tests.exactness.programs.loops import _by_hand, _compare, _judged, _losses, _model, _private

_BOUNDS = [2.0, 1.0, 3.0, 0.5]


def _rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 6, dtype=torch.float64)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _set_after_steps(change: Callable[..., Any], clipping: str = "flat") -> Callable[[int], Verdict]:
    """Steps after each of which something is set: called with the module, the optimizer, the losses and the step."""

    def run(seed: int) -> Verdict:
        given: Any = _BOUNDS if clipping == "per_layer" else 5.0
        model, module, optimizer, _ = _private(seed, loss_reduction="sum", clipping=clipping, max_grad_norm=given)
        worst = Verdict("exact")
        for number in range(4):
            x = _rows()
            bounds = list(optimizer.max_grad_norms) if clipping == "per_layer" else [optimizer.max_grad_norm] * 4
            expected = _by_hand(model, x, bounds, clipping == "flat")
            optimizer.zero_grad()
            losses = _losses(module, x)
            losses.sum().backward()
            optimizer.step()
            worst = worst.worse(_compare(_gradients(model), expected, number))
            if not math.isclose(math.hypot(*bounds[: 4 if clipping == "per_layer" else 1]), optimizer.noise_bound()):
                return Verdict("wrong", math.inf, f"noise for {optimizer.noise_bound():.3g}, bounds {bounds}", number)
            change(module, optimizer, losses, number)
        return worst

    return run


def _bound_of(value: Callable[[torch.Tensor, float], Any]) -> Callable[..., None]:
    def change(module: Any, optimizer: Any, *_: Any) -> None:
        optimizer.max_grad_norm = value(module.per_sample_gradient_norms, optimizer.max_grad_norm)

    return change


def _bound_of_losses(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.max_grad_norm = losses.mean().item()


def _noise_of_losses(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.noise_multiplier = losses.std().item() * 1e-30


def _bounds_of_norms(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.max_grad_norms = [module.per_sample_gradient_norms.max() / 2] * 4


def _schedule_beside_printed_norms(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    norms = module.per_sample_gradient_norms
    f"{losses.mean().item()} {norms.median().item()} {norms.tolist()} {losses.detach().numpy().max()}"
    ExponentialGradClip(optimizer, gamma=0.917).step()
    optimizer.noise_multiplier = 0.0


def _public_bounds(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.max_grad_norms = torch.tensor([1.7, 0.3, 2.9, 1.1]).mul(1 + number).tolist()


def _public_tensor(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.max_grad_norm = torch.tensor(4.321).exp()


def _other_number(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.max_grad_norms = [1.0, 2.0]


def _bounds_of_flat(module: Any, optimizer: Any, losses: torch.Tensor, number: int) -> None:
    optimizer.max_grad_norms = _BOUNDS


def _own_optimizer(seed: int) -> Verdict:
    """Steps the optimizer that was given to make_private."""
    model, module, optimizer, _ = _private(seed)
    _losses(module, _rows()).mean().backward()
    optimizer.original_optimizer.step()
    return Verdict("wrong", math.inf, f"{len(_gradients(model))} parameters have gradients, without noise")


def _copy(made: Callable[[Any, Any], nn.Module]) -> Callable[[int], Verdict]:
    """Trains a copy by a plain optimizer, whose gradients must be autograd's."""

    def run(seed: int) -> Verdict:
        model, module, _, _ = _private(seed)
        copied = made(model, module)
        x = _rows()
        _losses(copied, x).sum().backward()
        expected = _by_hand(model, x, [math.inf] * 4, True)
        found = _gradients(copied)
        return _compare(found, expected, 0) if found else Verdict("wrong", math.inf, "no gradients")

    return run


def _without_hooks(model: Any, module: Any) -> nn.Module:
    copied = copy.deepcopy(module)
    copied.remove_hooks()
    inner: nn.Module = copied._module
    return inner


def _teacher(seed: int) -> Verdict:
    """A frozen copy of the private model passes gradients on, and gives targets."""
    model, module, optimizer, _ = _private(seed, loss_reduction="sum")
    x = _rows()
    teacher = copy.deepcopy(module).requires_grad_(False)
    inputs = x.clone().requires_grad_()
    _losses(teacher, inputs).sum().backward()
    with torch.no_grad():
        teacher(x)
    optimizer.zero_grad()
    expected = _by_hand(model, x, [5.0] * 4, True)
    _losses(module, x).sum().backward()
    optimizer.step()
    return _compare(_gradients(model), expected, 0)


def _setting(name: str, allowed: Any, run: Callable[[int], Verdict]) -> Program:
    return Program(f"setting_{name}", _model, of_shape(1, 6), allowed, run=_judged(run))


PROGRAMS = [
    *(
        _setting(f"bound_of_{name}", "refused", _set_after_steps(_bound_of(value)))
        for name, value in {
            "the_median": lambda norms, now: norms.median(),
            "the_median_as_a_number": lambda norms, now: norms.median().item(),
            "a_quantile": lambda norms, now: torch.quantile(norms, 0.8).clamp(max=now),
            "a_moving_mean": lambda norms, now: 0.9 * now + 0.1 * norms.mean().item(),
            "half_the_largest": lambda norms, now: 0.5 * max(norms.tolist()),
            "the_mean_of_an_array": lambda norms, now: float(norms.numpy().mean()),
        }.items()
    ),
    _setting("bound_of_losses", "refused", _set_after_steps(_bound_of_losses)),
    _setting("noise_of_losses", "refused", _set_after_steps(_noise_of_losses)),
    _setting("bounds_of_norms", "refused", _set_after_steps(_bounds_of_norms, "per_layer")),
    _setting("bounds_of_another_number", "refused", _set_after_steps(_other_number, "per_layer")),
    _setting("bounds_of_flat", "refused", _set_after_steps(_bounds_of_flat)),
    _setting("schedule_beside_printed_norms", "exact", _set_after_steps(_schedule_beside_printed_norms)),
    _setting("bounds", "exact", _set_after_steps(_public_bounds, "per_layer")),
    _setting("bound_as_a_tensor", "exact", _set_after_steps(_public_tensor)),
    _setting("own_optimizer_stepped", "refused", _own_optimizer),
    _setting("copy_trained", "refused", _copy(lambda _, module: copy.deepcopy(module))),
    _setting("copy_of_the_inner_model_trained", "refused", _copy(lambda model, _: copy.deepcopy(model))),
    _setting("copy_without_hooks_trained", "exact", _copy(_without_hooks)),
    _setting("copy_as_a_teacher", "exact", _teacher),
]
