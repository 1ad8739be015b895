# SPDX-License-Identifier: Apache-2.0
"""Training loops through PrivacyEngine: sampling, BatchMemoryManager, schedulers of bounds and noise."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import PrivacyEngine
from opacus_memprof.errors import MemprofError
from tests.exactness.judge import Verdict, seed_all
from tests.exactness.program import Program, of_shape


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 40)).double()


def _losses(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out.square().sum(1) * (1 + x[:, 0].abs() * 10)


def _private(
    seed: int, samples: int = 24, batch: int = 8, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Any, Any, Any]:
    """The model, and what make_private returns."""
    seed_all(seed)
    model = _model() if model is None else model
    data = TensorDataset(torch.randn(samples, 6, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": 5.0, "poisson_sampling": False, **options}
    module, private, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch, generator=torch.Generator().manual_seed(seed)),
        **{"grad_sample_mode": "flash_clip", **arguments},
    )
    return model, module, private, loader


def _by_hand(
    model: nn.Module, rows: torch.Tensor, bounds: list[float], is_flat: bool, copied: nn.Module | None = None
) -> list[torch.Tensor]:
    """Clipped sums, by trained parameter, of a copy that is not private."""
    copied = _model() if copied is None else copied
    copied.load_state_dict(model.state_dict())
    trained = [own.requires_grad for own in model.parameters()]
    parameters = [p for p, is_trained in zip(copied.parameters(), trained, strict=True) if is_trained]
    total = [torch.zeros_like(p) for p in parameters]
    for row in rows:
        found = torch.autograd.grad(_losses(copied, row.unsqueeze(0)).sum(), parameters)
        whole = math.sqrt(sum(float(g.square().sum()) for g in found))
        for n, g in enumerate(found):
            norm = whole if is_flat else float(g.norm())
            total[n] += min(1.0, bounds[n] / (norm + 1e-6)) * g
    return total


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor], number: int) -> Verdict:
    error = max(float((a - b).norm()) / max(float(b.norm()), 1e-9) for a, b in zip(found, expected, strict=True))
    return Verdict("exact" if error <= 1e-6 else "wrong", error, f"{error:.3g} off in step {number}", number)


def _judged(run: Callable[[int], Verdict]) -> Callable[[int], Verdict]:
    def judged(seed: int) -> Verdict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return run(seed)
            except MemprofError as error:
                return Verdict("refused", message=str(error))
            except Exception as error:
                return Verdict("crash", message=f"{type(error).__name__}: {error}")

    return judged


def _train(seed: int, physical: int | None, reduction: str, **options: Any) -> Verdict:
    """Trains an epoch and compares each logical batch."""
    model, module, optimizer, loader = _private(seed, loss_reduction=reduction, **options)
    bounds = [5.0] * 4
    worst = Verdict("exact")
    rows: list[torch.Tensor] = []
    steps = 0

    def loop(batches: Any) -> None:
        nonlocal worst, steps
        for (x,) in batches:
            rows.append(x)
            optimizer.zero_grad()
            losses = _losses(module, x)
            expected = None
            (losses.mean() if reduction == "mean" else losses.sum()).backward()
            whole = torch.cat(rows)
            expected = _by_hand(model, whole, bounds, True)
            optimizer.step()
            if getattr(optimizer, "_is_last_step_skipped", False):
                continue
            rows.clear()
            steps += 1
            divisor = optimizer.expected_batch_size * optimizer.accumulated_iterations if reduction == "mean" else 1
            found = [p.grad * divisor for p in model.parameters()]
            worst = worst.worse(_compare(found, expected, steps))

    if physical is None:
        loop(loader)
    else:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as batches:
            loop(batches)
    if steps == 0:
        return Verdict("wrong", math.inf, "no step was made")
    if optimizer.drawn is not None and (optimizer.drawn.mismatches or optimizer.drawn.steps != steps):
        return Verdict(
            "wrong", math.inf, f"{optimizer.drawn.mismatches} of {optimizer.drawn.steps} steps are not the loader's"
        )
    return worst


def _positions_first(seed: int) -> Verdict:
    """Each position of a sequence counts as a sample, and there are as many as samples, on average."""
    _, module, optimizer, loader = _private(seed, samples=96, noise_multiplier=1.0, poisson_sampling=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for (x,) in loader:
            optimizer.zero_grad()
            module(x.unsqueeze(0).expand(8, -1, -1)).square().mean().backward()
            try:
                optimizer.step()
            except UserWarning as warning:
                return Verdict("refused", message=str(warning))
    return Verdict("wrong", math.inf, "no warning")


def _private_twice(mode: str) -> Callable[[int], Verdict]:
    """Makes a model private that was made private in some mode, and is refused then, not in a later forward."""

    def run(seed: int) -> Verdict:
        data = DataLoader(TensorDataset(torch.randn(24, 6, dtype=torch.float64)), batch_size=8)
        model = _model()
        for each in (mode, "flash_clip"):
            try:
                PrivacyEngine().make_private(
                    module=model,
                    optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
                    data_loader=data,
                    noise_multiplier=1.0,
                    max_grad_norm=1.0,
                    grad_sample_mode=each,
                )
            except MemprofError as error:
                return Verdict("refused", message=str(error))
        return Verdict("wrong", math.inf, "the model was made private twice")

    return run


def _with_scheduler(schedule: Callable[[Any], Any], clipping: str) -> Callable[[int], Verdict]:
    """Measures the bounds and the noise that are applied after a scheduler's step, and compares their ratio."""

    def run(seed: int) -> Verdict:
        bound: Any = [2.0, 1.0, 3.0, 0.5] if clipping == "per_layer" else 5.0
        kwargs = {"clipping": clipping, "max_grad_norm": bound, "noise_multiplier": 1.0, "loss_reduction": "sum"}
        model, module, optimizer, _ = _private(seed, noise_generator=torch.Generator().manual_seed(seed), **kwargs)
        scheduler = schedule(optimizer)
        worst = Verdict("exact")
        for number in range(3):
            bounds = _measured_bounds(model, module, optimizer)
            spread = _measured_noise(model, module, optimizer)
            expected = math.hypot(*bounds) * optimizer.noise_multiplier
            error = abs(spread / expected - 1)
            if error > 0.2:  # 1 300 elements: a standard deviation is known to 2 %
                return Verdict("wrong", error, f"noise {spread:.3g} for bounds of {math.hypot(*bounds):.3g}", number)
            worst = worst.worse(Verdict("exact", 0.0))
            scheduler.step()
        return worst

    return run


def _measured_bounds(model: nn.Module, module: Any, optimizer: Any) -> list[float]:
    """The norms to which one sample with a huge gradient is clipped, by parameter, without noise."""
    multiplier, optimizer.noise_multiplier = optimizer.noise_multiplier, 0.0
    optimizer.zero_grad()
    (1e9 * _losses(module, torch.ones(1, 6, dtype=torch.float64))).sum().backward()
    optimizer.pre_step()
    found = [float(p.grad.norm()) for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.noise_multiplier = multiplier
    return found


def _measured_noise(model: nn.Module, module: Any, optimizer: Any) -> float:
    """The standard deviation of a step whose gradients are zero."""
    optimizer.zero_grad()
    (0 * _losses(module, torch.ones(1, 6, dtype=torch.float64))).sum().backward()
    optimizer.pre_step()
    found = torch.cat([p.grad.flatten() for p in model.parameters()]).square().mean().sqrt()
    optimizer.zero_grad()
    return float(found)


def _refused_step(clipping: str, refuse: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[int], Verdict]:
    """A step is refused in the middle of a training, without a trace.

    Parameters, optimizer, accountant and generators stay, and training goes on as if the step had not been tried.
    """

    def run(seed: int) -> Verdict:
        bound: Any = [2.0] * 4 if clipping == "per_layer" else 5.0
        results = []
        for is_disturbed in (False, True):
            generator = torch.Generator().manual_seed(seed)
            options = {"noise_multiplier": 1.0, "loss_reduction": "sum", "clipping": clipping, "max_grad_norm": bound}
            if clipping == "adaptive":
                options |= _ADAPTIVE
            model, module, optimizer, _ = _private(seed, noise_generator=generator, **options)
            for number in range(3):
                x = torch.full((4, 6), 0.5 + number, dtype=torch.float64)
                if is_disturbed and number == 1:
                    found = _refuse(model, module, optimizer, generator, refuse, x)
                    if found is not None:
                        return found
                optimizer.zero_grad()
                _losses(module, x).sum().backward()
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
        return _compare(results[1], results[0], 2)

    return run


def _refuse(
    model: nn.Module, module: Any, optimizer: Any, generator: torch.Generator, refuse: Any, x: torch.Tensor
) -> Verdict | None:
    """Makes a step that must be refused. Returns a verdict if it was not, or if it changed anything."""

    def states() -> list[Any]:
        kept = [p.detach().clone() for p in model.parameters()]
        hooked = [repr(history) for history in _histories(optimizer)]
        return [*kept, generator.get_state(), repr(optimizer.original_optimizer.state_dict()), *hooked]

    before = states()
    try:
        optimizer.zero_grad()
        refuse(module, x).sum().backward()
        optimizer.step()
    except MemprofError as error:
        same = [
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, states(), strict=True)
        ]
        what = ["0.weight", "0.bias", "2.weight", "2.bias", "the generator", "the optimizer", "the accountant"]
        changed = [name for name, is_same in zip(what, same, strict=False) if not is_same]
        return Verdict("wrong", math.inf, f"{changed} changed before: {error}", 1) if changed else None
    return Verdict("wrong", math.inf, "a step that must be refused was made", 1)


def _histories(optimizer: Any) -> list[Any]:
    """The accountant's history, which the engine's hook on the optimizer adds to."""
    accountant = getattr(optimizer.step_hook, "__closure__", None)
    cells = [cell.cell_contents for cell in accountant or ()]
    return [cell.history for cell in cells if hasattr(cell, "history")]


def _not_a_number(module: Any, x: torch.Tensor) -> torch.Tensor:
    losses = _losses(module, x)
    return losses * torch.tensor([1.0, float("nan"), 1.0, 1.0], dtype=losses.dtype)


def _infinite(module: Any, x: torch.Tensor) -> torch.Tensor:
    return _losses(module, x) * 1e300


def _other_sizes(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Two forwards of other samples for one backward."""
    return torch.cat([_losses(module, x), _losses(module, x[:3])])


def _infinite_input(module: Any, x: torch.Tensor) -> torch.Tensor:
    return _losses(module, torch.where(torch.arange(len(x)).unsqueeze(1) == 2, torch.inf, x))


def _with_before(before: Callable[[nn.Module, Any, torch.Tensor], object]) -> Callable[[int], Verdict]:
    """Does something else with the model before each step."""

    def run(seed: int) -> Verdict:
        model, module, optimizer, _ = _private(seed, loss_reduction="sum")
        worst = Verdict("exact")
        for number in range(3):
            x = torch.randn(4, 6, dtype=torch.float64)
            optimizer.zero_grad()
            before(model, module, x)
            expected = _by_hand(model, x, [5.0] * 4, True)
            _losses(module, x).sum().backward()
            optimizer.step()
            worst = worst.worse(_compare([p.grad for p in model.parameters()], expected, number))
        return worst

    return run


def _attack(model: nn.Module, module: Any, x: torch.Tensor) -> None:
    """Finds gradients of the inputs while the model is frozen, as for adversarial examples, or a generator's step."""
    inputs = x.clone().requires_grad_()
    model.requires_grad_(False)
    (gradient,) = torch.autograd.grad(_losses(module, inputs).sum(), inputs)
    model.requires_grad_(True)
    x.add_(0.1 * gradient.sign())


def _dropped_backward(model: nn.Module, module: Any, x: torch.Tensor) -> None:
    _losses(module, 2 * x).sum().backward()
    module.zero_grad()


def _hooks(change: Callable[[torch.Tensor], object]) -> Callable[[nn.Module, Any, torch.Tensor], object]:
    def before(model: nn.Module, module: Any, x: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(change)  # type: ignore[no-untyped-call]

    return before


def _update(parameter: Any) -> None:
    parameter.data.add_(parameter.grad)


_ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 1e8,
    "min_clipbound": 1e-3,
    "unclipped_num_std": 1.0,
}
_REFUSED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "nan": _not_a_number,
    "overflow": _infinite,
    "sizes": _other_sizes,
    "infinite_input": _infinite_input,
}
_BEFORE: dict[str, Callable[[nn.Module, Any, torch.Tensor], object]] = {
    "attack_on_the_frozen_model": _attack,
    "backward_that_the_module_drops": _dropped_backward,
    "hooks_that_drop_gradients": _hooks(lambda parameter: setattr(parameter, "grad", None)),
    "hooks_that_update_parameters": _hooks(_update),
}
_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda optimizer: ExponentialGradClip(optimizer, gamma=0.5),
    "clip_steps": lambda optimizer: StepGradClip(optimizer, step_size=1, gamma=3.0),
    "noise": lambda optimizer: ExponentialNoise(optimizer, gamma=0.5),
}


def _loop(name: str, allowed: Any, run: Callable[[int], Verdict]) -> Program:
    return Program(f"loop_{name}", _model, of_shape(1, 6), allowed, run=_judged(run))


PROGRAMS = [
    *(
        _loop(
            f"{reduction}_{'whole' if physical is None else f'in_{physical}'}_{'poisson' if poisson else 'shuffled'}",
            "exact",
            lambda seed, r=reduction, p=physical, q=poisson: _train(seed, p, r, poisson_sampling=q),
        )
        for reduction in ("mean", "sum")
        for physical in (None, 3, 8)
        for poisson in (False, True)
    ),
    *(_loop(f"with_{name}", "exact", _with_before(before)) for name, before in _BEFORE.items()),
    _loop("positions_first_of_the_batch_s_size", "refused", _positions_first),
    _loop("private_twice", "refused", _private_twice("flash_clip")),
    _loop("private_after_hooks", "refused", _private_twice("hooks")),
    _loop("two_passes_in_3", "exact", lambda seed: _train(seed, 3, "mean", flash_clip_passes=2)),
    _loop("few_samples_poisson", "exact", lambda seed: _train(seed, None, "mean", samples=4, poisson_sampling=True)),
    *(
        _loop(f"{clipping}_goes_on_after_{name}", "exact", _refused_step(clipping, refuse))
        for clipping in ("flat", "per_layer", "adaptive", "automatic")
        for name, refuse in _REFUSED.items()
    ),
    *(
        _loop(f"{clipping}_{name}_scheduler", allowed, _with_scheduler(schedule, clipping))
        for name, schedule in _SCHEDULERS.items()
        for clipping, allowed in (("flat", "exact"), ("per_layer", "either"))
    ),
]
