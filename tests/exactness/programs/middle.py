# SPDX-License-Identifier: Apache-2.0
"""Loops that change something in the middle of a step: layers, dtypes, bounds, divisors, the optimizer's parameters."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from tests.exactness.judge import Verdict
from tests.exactness.program import Program, of_shape
from tests.exactness.programs.loops import _by_hand, _compare, _judged, _losses, _model, _private


def _rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 6, dtype=torch.float64)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.double() for p in model.parameters() if p.grad is not None and p.requires_grad]


def _backward(module: Any, x: torch.Tensor) -> None:
    _losses(module, x.to(next(module.parameters()).dtype)).sum().backward()


def _with(middle: Callable[[nn.Module, Any], None], in_parts: bool = False) -> Callable[[int], Verdict]:
    """Two backward passes of a step, or two parts of a batch, with a change between them."""

    def run(seed: int) -> Verdict:
        model, module, optimizer, _ = _private(seed, loss_reduction="sum")
        first, second = _rows(), _rows()
        before = _by_hand(model, first, [5.0] * 4, True)
        if in_parts:
            optimizer.signal_skip_step(True)
        _backward(module, first)
        if in_parts:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.signal_skip_step(False)
        middle(model, optimizer)
        _backward(module, second)
        after = _by_hand(model, second, [5.0] * 4, True)
        optimizer.step()
        return _compare(_gradients(model), [a + b for a, b in zip(before, after, strict=True)], 0)

    return run


def _freeze(model: Any, optimizer: Any) -> None:
    model[2].bias.requires_grad_(False)


def _add(model: Any, optimizer: Any) -> None:
    added = nn.Linear(40, 3).double()
    model.append(added)
    optimizer.add_param_group({"params": list(added.parameters())})


def _add_frozen(model: Any, optimizer: Any) -> None:
    model.append(nn.Linear(40, 3).double().requires_grad_(False))


def _replace(model: Any, optimizer: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = model[0].weight


def _frozen_between_two_forwards(seed: int) -> Verdict:
    """Both forwards have the same samples and one backward; their layers would count a parameter twice."""
    model, module, optimizer, _ = _private(seed, loss_reduction="sum", max_grad_norm=1e-3)
    x = _rows()
    first = _losses(module, x).sum()
    _freeze(model, optimizer)
    (first + _losses(module, x).sum()).backward()
    optimizer.step()
    size = math.hypot(*(float(g.norm()) for g in _gradients(model)))
    return Verdict("wrong", size / 4e-3, f"four samples have a sum of {size / 1e-3:.3g} C")


def _goes_on_after_change(seed: int) -> Verdict:
    """A backward whose gradients are dropped does not forbid to change the model, nor does a refused forward."""
    model, module, optimizer, _ = _private(seed, loss_reduction="sum")
    worst = Verdict("exact")
    for number in range(4):
        _backward(module, _rows())
        model[2 * (number % 2)].requires_grad_(False)
        if number > 1:  # refused, with the gradients of the backward before
            refused = _judged(lambda _: _backward(module, _rows()) or Verdict("exact"))(seed)
            if refused.outcome != "refused":
                return Verdict("wrong", math.inf, f"{refused.outcome} {refused.message}", number)
        optimizer.zero_grad()
        x = _rows()
        expected = _by_hand(model, x, [5.0] * 4, True)
        _backward(module, x)
        optimizer.step()
        worst = worst.worse(_compare(_gradients(model), expected, number))
        optimizer.zero_grad()
        model.requires_grad_(True)
    return worst


def _empty_after(change: Callable[[Any, Any], None]) -> Callable[[int], Verdict]:
    """The first batch after a change has no samples."""

    def run(seed: int) -> Verdict:
        model, module, optimizer, _ = _private(seed, loss_reduction="sum")
        worst = Verdict("exact")
        for number, samples in enumerate((4, 0, 3, 0)):
            if number == 1:
                change(model, optimizer)
            x = _rows(samples)
            copied = nn.Sequential(*_model(), nn.Linear(40, 3).double()) if len(model) > 3 else None
            expected = _by_hand(model, x, [5.0] * 6, True, copied)
            optimizer.zero_grad()
            _backward(module, x)
            optimizer.step()
            worst = worst.worse(_compare(_gradients(model), expected, number))
        return worst

    return run


def _between_backward_and_step(change: Callable[[Any, Any], Any]) -> Callable[[int], Verdict]:
    def run(seed: int) -> Verdict:
        model, module, optimizer, _ = _private(seed, loss_reduction="sum")
        x = _rows()
        expected = _by_hand(model, x, [5.0] * 4, True)
        _backward(module, x)
        change(model, optimizer)
        optimizer.step()
        return _compare(_gradients(model), expected, 0)

    return run


def _expecting(number: Any, reduction: str = "mean") -> Callable[[int], Verdict]:
    """A step with another number of samples to divide by."""

    def run(seed: int) -> Verdict:
        model, module, optimizer, _ = _private(seed, loss_reduction=reduction)
        optimizer.expected_batch_size = number
        x = _rows()
        expected = _by_hand(model, x, [5.0] * 4, True)
        losses = _losses(module, x)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        optimizer.step()
        divisor = number if reduction == "mean" else 1
        return _compare([g * divisor for g in _gradients(model)], expected, 0)

    return run


def _one_of_49(seed: int) -> Verdict:
    """Opacus expects int(49 * (1 / 49)) samples, which is 0."""
    _, module, optimizer, loader = _private(seed, samples=49, batch=1)
    for (x,) in loader:
        optimizer.zero_grad()
        _losses(module, x).mean().backward()
        optimizer.step()
    return Verdict("wrong", math.inf, f"expected_batch_size={optimizer.expected_batch_size}")


def _both_schedulers(clipping: str) -> Callable[[int], Verdict]:
    """Schedulers of bounds and of noise together, which go back to a saved state in the middle."""

    def run(seed: int) -> Verdict:
        bounds = [2.0, 1.0, 3.0, 0.5] if clipping == "per_layer" else [5.0] * 4
        given: Any = bounds if clipping == "per_layer" else 5.0
        model, module, optimizer, _ = _private(
            seed, loss_reduction="sum", clipping=clipping, max_grad_norm=given, noise_multiplier=1.0
        )
        start = optimizer.max_grad_norm
        schedulers = [ExponentialGradClip(optimizer, gamma=0.7), ExponentialNoise(optimizer, gamma=0.9)]
        worst = Verdict("exact")
        for number in range(4):
            if number == 2:
                saved = copy.deepcopy([each.state_dict() for each in schedulers])
                for each in schedulers:
                    each.step()
                for each, state in zip(schedulers, saved, strict=True):
                    each.load_state_dict(state)
                optimizer.max_grad_norm, optimizer.noise_multiplier = start * 0.7**2, 0.9**2
            x = _rows(8)
            expected = _by_hand(model, x, [b * 0.7**number for b in bounds], clipping == "flat")
            multiplier, optimizer.noise_multiplier = optimizer.noise_multiplier, 0.0
            optimizer.zero_grad()
            _backward(module, x)
            optimizer.step()
            worst = worst.worse(_compare(_gradients(model), expected, number))
            optimizer.noise_multiplier = multiplier
            if not math.isclose(optimizer.noise_std(), 0.9**number * start * 0.7**number):
                return Verdict("wrong", math.inf, f"noise {optimizer.noise_std():.3g}", number)
            for each in schedulers:
                each.step()
        return worst

    return run


def _adaptive_noise(seed: int) -> Verdict:
    options = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0}
    _, module, optimizer, _ = _private(
        seed,
        loss_reduction="sum",
        clipping="adaptive",
        noise_multiplier=1.0,
        min_clipbound=0.01,
        unclipped_num_std=1.0,
        **options,
    )
    scheduler = ExponentialNoise(optimizer, gamma=3.0)
    for _ in range(2):
        optimizer.zero_grad()
        _backward(module, _rows())
        optimizer.step()
        scheduler.step()
    return Verdict("wrong", math.inf, "noise that no theorem covers")


def _dropped_in_parts(seed: int) -> Verdict:
    """BatchMemoryManager's parts have samples that are not finite, at other places in each."""
    model, module, optimizer, loader = _private(seed, loss_reduction="sum", samples=21, flash_clip_nonfinite="drop")
    rows: list[torch.Tensor] = []
    worst = Verdict("exact")
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        for number, (given,) in enumerate(parts):
            x = given.clone()
            x[number % len(x)] = math.nan if number % 2 else math.inf
            rows.append(x)
            optimizer.zero_grad()
            _losses(module, x).sum().backward()
            whole = torch.cat(rows)
            kept = whole.isfinite().all(1)
            expected = _by_hand(model, whole[kept], [5.0] * 4, True)
            optimizer.step()
            if optimizer._is_last_step_skipped:
                continue
            rows.clear()
            if optimizer.dropped_samples != (~kept).nonzero().flatten().tolist():
                return Verdict("wrong", math.inf, f"dropped {optimizer.dropped_samples}", number)
            worst = worst.worse(_compare(_gradients(model), expected, number))
    return worst


def _parts_are_the_whole(reduction: str) -> Callable[[int], Verdict]:
    """Gradients in parts of any size equal those of the undivided batch, the divisor included."""

    def run(seed: int) -> Verdict:
        worst = Verdict("exact")
        whole: list[list[torch.Tensor]] = []
        for size in (19, 1, 3, 5, 7, 8):
            model, module, optimizer, loader = _private(seed, loss_reduction=reduction, samples=19)
            found: list[list[torch.Tensor]] = []
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
                for (x,) in parts:
                    optimizer.zero_grad()
                    losses = _losses(module, x)
                    (losses.mean() if reduction == "mean" else losses.sum()).backward()
                    optimizer.step()
                    if not optimizer._is_last_step_skipped:
                        found.append([g.clone() for g in _gradients(model)])
            whole = whole or found
            for number, (a, b) in enumerate(zip(found, whole, strict=True)):
                worst = worst.worse(_compare(a, b, number))
        return worst

    return run


def _normalized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(6, 30)), nn.Tanh(), weight_norm(nn.Linear(30, 40))).double()


def _reads_weights(penalty: float) -> Callable[[int], Verdict]:
    """A loop that reads a parametrized weight, with gradients: to log it, or for a penalty."""

    def run(seed: int) -> Verdict:
        model, module, optimizer, _ = _private(seed, loss_reduction="sum", model=_normalized())
        worst = Verdict("exact")
        for number in range(3):
            x = _rows()
            expected = _by_hand(model, x, [5.0] * 6, True, _normalized())
            optimizer.zero_grad()
            norm = model[0].weight.norm()
            loss = _losses(module, x).sum()
            (loss + penalty * norm if penalty else loss).backward()
            float(model[2].weight.norm())
            optimizer.step()
            worst = worst.worse(_compare(_gradients(model), expected, number))
        return worst

    return run


def _averaged(seed: int) -> Verdict:
    """Averages of the weights are copies of the private model, and one passes gradients on to its inputs."""
    model, module, optimizer, _ = _private(seed, loss_reduction="sum")
    averages = [AveragedModel(module), AveragedModel(model)]
    worst = Verdict("exact")
    for number in range(4):
        x = _rows()
        expected = _by_hand(model, x, [5.0] * 4, True)
        optimizer.zero_grad()
        _backward(module, x)
        optimizer.step()
        worst = worst.worse(_compare(_gradients(model), expected, number))
        for average in averages:
            average.update_parameters(average.module if number == 3 else (module if average is averages[0] else model))
            with torch.no_grad():
                average(x)
        averages[1].requires_grad_(False)(x.requires_grad_()).sum().backward()
    return worst


def _in_eval_for_its_backward(seed: int) -> Verdict:
    model, module, optimizer, _ = _private(seed, loss_reduction="sum")
    worst = Verdict("exact")
    for number in range(3):
        x = _rows()
        expected = _by_hand(model, x, [5.0] * 4, True)
        optimizer.zero_grad()
        loss = _losses(module, x).sum()
        module.eval()
        loss.backward()
        optimizer.step()
        worst = worst.worse(_compare(_gradients(model), expected, number))
        module.train()
    return worst


def _compiled_step(seed: int) -> Verdict:
    """A whole step that is compiled: flash_clip's own part of it runs as it is."""
    model, module, optimizer, _ = _private(seed, loss_reduction="sum")
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        _losses(module, x).sum().backward()
        optimizer.step()

    worst = Verdict("exact")
    for number in range(3):
        x = _rows()
        expected = _by_hand(model, x, [5.0] * 4, True)
        step(x)
        worst = worst.worse(_compare(_gradients(model), expected, number))
    return worst


def _of_hooks(clipping: str, mode: str) -> Callable[[int], Verdict]:
    def run(seed: int) -> Verdict:
        _private(seed, clipping=clipping, grad_sample_mode=mode)
        return Verdict("wrong", math.inf, "accepted")

    return run


def _middle(name: str, allowed: Any, run: Callable[[int], Verdict]) -> Program:
    return Program(f"middle_{name}", _model, of_shape(1, 6), allowed, run=_judged(run))


PROGRAMS = [
    *(
        _middle(f"{name}_between_backwards", "refused", _with(change))
        for name, change in (("freeze", _freeze), ("add", _add), ("add_frozen", _add_frozen), ("replace", _replace))
    ),
    *(
        _middle(f"{name}_between_parts", allowed, _with(change, in_parts=True))
        for name, change, allowed in (
            ("freeze", _freeze, "refused"),
            ("replace", _replace, "refused"),
            ("float64", lambda model, _: model.double(), "exact"),
        )
    ),
    *(
        _middle(f"empty_after_{name}", "exact", _empty_after(change))
        for name, change in (("freeze", _freeze), ("add", _add), ("replace", _replace))
    ),
    _middle("freeze_between_two_forwards", "refused", _frozen_between_two_forwards),
    _middle("goes_on_after_change", "exact", _goes_on_after_change),
    *(
        _middle(f"{name}_between_backward_and_step", allowed, _between_backward_and_step(change))
        for name, change, allowed in (
            ("freeze", _freeze, "refused"),
            ("freeze_all", lambda model, _: model.requires_grad_(False), "refused"),
            ("bfloat16", lambda model, _: model.to(torch.bfloat16), "refused"),
            ("eval", lambda model, _: model.eval(), "exact"),
            ("reorder", lambda _, optimizer: optimizer.param_groups[0]["params"].reverse(), "exact"),
        )
    ),
    *(_middle(f"expecting_{n}", "refused", _expecting(n)) for n in (None, 0, -8, math.nan, math.inf)),
    *(_middle(f"expecting_{n}", "exact", _expecting(n)) for n in (1, 2.5, 1e-20, 1e20)),
    *(_middle(f"expecting_{n}_of_a_sum", "exact", _expecting(n, "sum")) for n in (None, 0, -8)),
    _middle("expecting_one_of_49", "refused", _one_of_49),
    *(_middle(f"{each}_both_schedulers", "exact", _both_schedulers(each)) for each in ("flat", "per_layer")),
    _middle("adaptive_noise_rises", "refused", _adaptive_noise),
    _middle("dropped_in_parts", "exact", _dropped_in_parts),
    *(_middle(f"parts_are_the_whole_{each}", "exact", _parts_are_the_whole(each)) for each in ("mean", "sum")),
    _middle("weight_norm_is_logged", "exact", _reads_weights(0.0)),
    _middle("weight_norm_is_penalized", "refused", _reads_weights(0.1)),
    _middle("weights_are_averaged", "exact", _averaged),
    _middle("compiled_step", "exact", _compiled_step),
    _middle("eval_for_its_backward", "exact", _in_eval_for_its_backward),
    *(
        _middle(f"{clipping}_in_{mode}", "refused", _of_hooks(clipping, mode))
        for clipping, mode in (("automatic", "hooks"), ("adaptive", "ghost"), ("no_such", "functorch"))
    ),
]
