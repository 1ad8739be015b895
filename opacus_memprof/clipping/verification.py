# SPDX-License-Identifier: Apache-2.0
"""Compares the clipping of any grad_sample_mode with clipping by hand, one sample at a time."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.utils import prepare_module
from opacus.optimizers import get_optimizer_class
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from opacus_memprof.clipping.forwards.state import ModuleState, RandomState
from opacus_memprof.clipping.module.hooks import GradSampleModuleFlashClip
from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip
from opacus_memprof.clipping.proof.by_hand import Gradients, are_close, exchanges, norm
from opacus_memprof.errors import MemprofError

Losses = Callable[[nn.Module, Any], torch.Tensor]
_MODES = ("flash_clip", "hooks", "functorch", "ew", "ghost")
_STABILITY = 1e-6  # as in Opacus
_SAME_LOSS = 1e-6
_NOISE_MULTIPLIER = 1.3
_FEWEST_DRAWS = 512  # for each parameter, unless the model is so large that this would take long
_MOST_DRAWS = 50_000_000  # for all parameters together
_MOST_SIGMAS = 6.0  # 2 in 10^9 draws are outside of this range


@dataclass(frozen=True)
class Verification:
    """The difference between a mode's clipping and clipping by hand.

    Attributes:
        mode: the grad_sample_mode.
        norms: per-sample gradient norms, computed by hand.
        norm_error: the largest relative error of a sample's norm; inf if the mode cannot run the model.
        errors: the largest error of each parameter's clipped gradient, relative to its largest element.
        tolerance: the largest error that counts as exact: 1e-8, or 1e-4 where the model computes in float32.
        failure: any other defect, in a sentence: the mode cannot run the model, the samples influence one another, or
            the noise differs from the requested one. None if there is no such defect.
        noise: the standard deviation of each parameter's noise in a step without gradients, relative to the requested
            one.
    """

    mode: str
    norms: list[float]
    norm_error: float
    errors: dict[str, float]
    tolerance: float
    failure: str | None = None
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether all errors are within the tolerance, and the noise is right."""
        return self.failure is None and max([self.norm_error, *self.errors.values()]) <= self.tolerance

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure
        worst = max(self.errors, key=lambda name: self.errors[name])
        if self.exact:
            return (
                f"grad_sample_mode={self.mode!r} clips this model exactly: {len(self.norms)} samples, "
                f"{len(self.errors)} parameters, largest relative error {max(self.norm_error, self.errors[worst]):.1e}."
            )
        wrong = sum(error > self.tolerance for error in self.errors.values())
        return (
            f"grad_sample_mode={self.mode!r} does not clip this model exactly: the norms are off by up to "
            f"{_share(self.norm_error)}, the clipped gradients of {wrong} of {len(self.errors)} parameters by up to "
            f"{_share(self.errors[worst])} (of {worst})."
        )


def _share(error: float) -> str:
    return f"{error:.1%}" if error >= 1e-3 else f"{error:.1e}"


def verify(
    model: nn.Module,
    batch: Any,
    mode: str = "flash_clip",
    *,
    losses: Losses | None = None,
    max_samples: int | None = None,
) -> Verification:
    """Compares a mode's per-sample norms, clipped gradients and noise with those of clipping by hand.

    By hand means one sample at a time. It works on copies of the model, in float64 if the model runs in it. A model
    that draws random numbers, for dropout, stochastic depth or noise, draws the same ones by hand and in the mode. The
    model, its gradients and the random number generators are restored.

    Args:
        model: the model, not made private.
        batch: the arguments of the model, samples first: a tensor, a sequence of positional arguments, or a mapping of
            keyword arguments. Tensors with another number of rows than the first one are the same for all samples.
        mode: "flash_clip", "hooks", "functorch", "ew" or "ghost".
        losses: a function of model and batch that returns the losses of the samples, [B]. Default: a weighted sum of
            all outputs and of their squares.
        max_samples: the number of samples of the batch that are used. Default: all.

    Returns:
        The errors, and the reason of a failure. Printing it gives a sentence.

    Raises:
        MemprofError: the mode is unknown, the model has been made private or does not run on the batch, flash_clip does
            not support it, or no gradient can be computed.
    """
    if mode not in _MODES:
        raise MemprofError(f"mode is {mode!r}; verify knows {', '.join(_MODES)}.")
    if isinstance(model, AbstractGradSampleModule):
        raise MemprofError("the model has been made private; verify the model before make_private.")
    if max_samples is not None and max_samples < 1:
        raise MemprofError(f"max_samples is {max_samples}; it must be positive, or None for all samples.")
    batch = _first_samples(batch, max_samples)
    losses = losses or _losses_of_outputs
    state = RandomState.now(*{p.device for p in model.parameters()})
    with state.restored():
        prepared, converted, tolerance = _runnable(model, batch, losses)
        hand = _Hand(prepared, converted, losses, state)
        norms, _ = hand.clip(1.0)
        bound = sorted(norms)[len(norms) // 2]  # so that some samples are clipped
        if not 0 < bound < math.inf:
            raise MemprofError(
                "the gradients of these samples are zero or not finite: give losses that depend on them."
            )
        failed = Verification(mode, norms, math.inf, dict.fromkeys(_trained(prepared), math.inf), tolerance)
        mixing = (
            f"grad_sample_mode={mode!r} cannot clip this model exactly: the samples of a batch influence one another, "
            "because a sample's loss changed with the inputs of others."
        )
        if hand.draws and hand.mixes():
            return replace(failed, failure=mixing)
        _, expected = hand.clip(bound)
        hand.restore()
        try:
            found_norms, found, noise, wrong = _by_mode(mode, prepared, converted, losses, bound, state)
        except MemprofError:
            raise
        except Exception as error:  # a mode may raise anything for a model that it does not support
            message = str(error).strip().partition("\n")[0]
            why = f"{type(error).__name__}: {message}".rstrip(":. ")
            return replace(failed, failure=f"grad_sample_mode={mode!r} cannot run this model: {why}.")
        result = Verification(
            mode,
            norms,
            max(abs(a - b) / max(b, 1e-9 * bound) for a, b in zip(found_norms, norms, strict=True)),
            _relative_errors(found, expected),
            tolerance,
            f"grad_sample_mode={mode!r} does not give the privacy that is accounted for: {wrong}." if wrong else None,
            noise,
        )
        if result.exact or result.failure or not hand.mixes():
            return result
        return replace(result, failure=mixing)


def _runnable(model: nn.Module, batch: Any, losses: Losses) -> tuple[nn.Module, Any, float]:
    """Returns copies of model and batch, and the tolerance.

    The copies are in float64, or in float32 if the model does not run in float64.

    Raises:
        MemprofError: the model does not run on the batch.
    """
    error: Exception | None = None
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        copied, converted = _copy_of(model, dtype), _cast(batch, dtype)
        try:
            torch.autograd.backward(losses(copied, converted).sum())
        except MemprofError:
            raise
        except Exception as raised:  # the model may raise anything; some operations have no float64
            error = raised
            continue
        copied.zero_grad()
        return copied, converted, tolerance
    message = str(error).strip().partition("\n")[0]
    raise MemprofError(
        f"the model does not run on this batch ({type(error).__name__}: {message}): call it as the training does."
    ) from error


def _relative_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    smallest = 1e-6 * max(float(each.abs().max()) for each in expected.values())
    return {
        name: float((found[name] - each).abs().max()) / max(float(each.abs().max()), smallest)
        for name, each in expected.items()
    }


def _trained(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class _Hand:
    """Clipping by hand.

    A model that draws random numbers runs once on the whole batch, with the same random state; the loss of each sample
    has a backward of its own. Other models run on one sample at a time.
    """

    def __init__(self, model: nn.Module, batch: Any, losses: Losses, state: RandomState) -> None:
        self._model, self._batch, self._losses, self._state = model, batch, losses, state
        self._size = _size(batch)
        self._module_state = ModuleState(model)
        self._run(batch)
        self.draws = state.has_moved()

    def clip(self, bound: float) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Returns the per-sample norms, and the sum of clipped gradients for each parameter."""
        trained = _trained(self._model)
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        norms = []
        for gradients in self._gradients(list(trained.values())):
            norms.append(math.hypot(*(norm(g) for g in gradients if g is not None)))
            for name, g in zip(trained, gradients, strict=True):
                if g is not None:
                    total[name] += min(1.0, bound / (norms[-1] + _STABILITY)) * g
        return norms, total

    def mixes(self) -> bool:
        """Returns whether a sample's loss depends on other samples."""
        before = self._run(self._batch)
        for kept, rows in exchanges(self._size):
            after = self._run(tree_map(lambda x, rows=rows: x[rows] if _has_samples(x, self._size) else x, self._batch))
            if not are_close(before[kept], after[kept], _SAME_LOSS):
                return True
        return False

    def restore(self) -> None:
        """Restores random numbers, buffers and attributes, so that each forward begins as the mode's does."""
        self._state.restore()
        self._module_state.restore()

    def _run(self, batch: Any) -> torch.Tensor:
        self.restore()
        return self._losses(self._model, batch).detach()

    def _gradients(self, parameters: list[nn.Parameter]) -> Iterator[Gradients]:
        self.restore()
        if self.draws:
            for loss in self._losses(self._model, self._batch).unbind():
                yield list(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))
            return
        for n in range(self._size):
            sample = tree_map(lambda x, n=n: x[n : n + 1] if _has_samples(x, self._size) else x, self._batch)
            self.restore()
            try:
                loss = self._losses(self._model, sample).sum()
            except MemprofError:
                raise
            except Exception as error:  # the model may raise anything
                message = str(error).strip().partition("\n")[0]
                raise MemprofError(
                    f"the model does not run on one sample of this batch alone ({type(error).__name__}: {message}), so "
                    "that per-sample gradients do not exist: use layers that treat samples separately, such as "
                    "GroupNorm instead of BatchNorm."
                ) from error
            yield list(torch.autograd.grad(loss, parameters, allow_unused=True))


_Found = tuple[list[float], dict[str, torch.Tensor], dict[str, float], str | None]


def _by_mode(mode: str, model: nn.Module, batch: Any, losses: Losses, bound: float, state: RandomState) -> _Found:
    """Returns norms, clipped gradients and noise of a mode, computed on a copy of the model, and a defect or None."""
    copied = copy.deepcopy(model)
    trained = _trained(copied)
    options: dict[str, Any] = {"max_grad_norm": bound} if mode in ("ghost", "flash_clip") else {}
    module: Any
    if mode == "flash_clip":
        module = GradSampleModuleFlashClip(copied, loss_reduction="sum", **options)
    else:
        module = prepare_module(copied, mode, batch_first=True, loss_reduction="sum", **options)
    optimizer = _optimizer(mode, module, list(trained.values()), bound)
    state.restore()
    each = losses(module, batch)
    torch.autograd.backward(each.sum(), retain_graph=mode == "ghost")
    if mode == "flash_clip":
        optimizer.pre_step()
        norms = module.per_sample_gradient_norms
    elif mode == "ghost":
        norms, factors = module.get_norm_sample(), module.get_clipping_coef()
        copied.zero_grad()
        module.disable_hooks()
        torch.autograd.backward((each * factors).sum())
    else:
        stacks = [p.grad_sample for p in trained.values()]
        norms = torch.stack([stack.flatten(1).square().sum(1) for stack in stacks]).sum(0).sqrt()
        optimizer.clip_and_accumulate()
        for parameter in trained.values():
            parameter.grad = parameter.summed_grad
    found = {name: p.grad for name, p in trained.items()}
    optimizer.noise_multiplier = _NOISE_MULTIPLIER
    noise, wrong = _measure_noise(optimizer, {p: name for name, p in trained.items()}, _NOISE_MULTIPLIER * bound)
    return norms.tolist(), found, noise, wrong


def _optimizer(mode: str, module: Any, parameters: list[nn.Parameter], bound: float) -> Any:
    options: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": bound, "expected_batch_size": 1}
    plain = torch.optim.SGD(parameters, lr=1.0)
    if mode == "flash_clip":
        return DPOptimizerFlashClip(plain, module=module, loss_reduction="sum", **options)
    return get_optimizer_class("flat", False, mode)(optimizer=plain, loss_reduction="sum", **options)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, Sequence) else model(batch)


def _losses_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    leaves = tree_flatten(_call(model, batch))[0]
    outputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad and x.dim()]
    if not outputs:
        raise MemprofError("no output of the model has both gradients and samples; give verify the losses.")
    total = torch.zeros(_size(batch), dtype=outputs[0].dtype, device=outputs[0].device)
    for x in outputs:
        if len(x) == len(total):
            flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
            weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=x.dtype, device=x.device)
            total = total + ((flat * weights).mean(1) + flat.square().mean(1)).to(total)
    return total


def _copy_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    copied = copy.deepcopy(model).to(dtype)
    if not model.training:  # in a model in training, layers that are frozen in eval stay so
        copied.train()
    copied.zero_grad()
    return copied


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, batch)


def _size(batch: Any) -> int:
    return next((len(x) for x in tree_flatten(batch)[0] if isinstance(x, torch.Tensor) and x.dim()), 0)


def _has_samples(x: Any, size: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == size


def _first_samples(batch: Any, count: int | None) -> Any:
    size = _size(batch)
    if not size:
        raise MemprofError("the batch has no sample; give verify tensors whose first dimension is the batch.")
    return tree_map(lambda x: x[:count] if _has_samples(x, size) else x, batch)


def _measure_noise(
    optimizer: Any, names: Mapping[nn.Parameter, str], std: float
) -> tuple[dict[str, float], str | None]:
    """Draws an optimizer's noise several times, added to sums that are zero.

    Args:
        optimizer: a DPOptimizer with loss_reduction="sum", whose `p.summed_grad` may be replaced.
        names: the parameters that must get noise.
        std: the requested standard deviation.

    Returns:
        Each parameter's standard deviation divided by `std`, and a description of a defect, or None.
    """
    elements = sum(parameter.numel() for parameter in names)
    smallest = min(parameter.numel() for parameter in names)
    repeats = max(2, min(-(-_FEWEST_DRAWS // smallest), _MOST_DRAWS // max(elements, 1)))
    drawn: dict[nn.Parameter, list[torch.Tensor]] = {parameter: [] for parameter in names}
    for _ in range(repeats):
        for parameter in optimizer.params:
            parameter.summed_grad = torch.zeros_like(parameter)
            parameter.grad = None
        optimizer.add_noise()
        for parameter, kept in drawn.items():
            if sum(map(len, kept)) < 10 * _FEWEST_DRAWS or len(kept) < 2:
                noise = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                kept.append(noise.detach().double().flatten().cpu() / std)
    draws = {names[parameter]: each for parameter, each in drawn.items()}
    stds = {name: float(torch.cat(each).square().mean().sqrt()) for name, each in draws.items()}
    return stds, _dependent(draws) or _wrong_size(draws, std)


def _wrong_size(draws: Mapping[str, list[torch.Tensor]], std: float) -> str | None:
    for name, each in draws.items():
        joined = torch.cat(each)
        count, square = len(joined), float(joined.square().mean())
        # The cube root of a chi-square variable is close to normal (Wilson and Hilferty 1931).
        spread = math.sqrt(2 / (9 * count))
        sigmas = (square ** (1 / 3) - 1 + spread**2) / spread
        if not abs(sigmas) <= _MOST_SIGMAS:
            return (
                f"the noise of {name} has a standard deviation of {math.sqrt(square) * std:.3g}, but {std:.3g} was "
                f"asked for ({count} draws)"
            )
        if not abs(float(joined.mean())) * math.sqrt(count) <= _MOST_SIGMAS:
            return f"the noise of {name} has a mean of {float(joined.mean()) * std:.3g} instead of 0 ({count} draws)"
    return None


def _dependent(draws: Mapping[str, list[torch.Tensor]]) -> str | None:
    """Returns which parameters' noise is correlated with earlier noise, or None.

    Compares each parameter's noise with that of the previous step, of the previous parameter, and of the first
    parameter of the same size. Generators with equal seeds draw equal numbers.
    """
    first_of_size: dict[int, str] = {}
    previous: str | None = None
    for name, each in draws.items():
        if _is_correlated(each[:-1], each[1:]):
            return f"the noise of {name} repeats that of the step before"
        for other in {previous, first_of_size.setdefault(len(each[0]), name)} - {None, name}:
            if _is_correlated(each, draws[other]):  # type: ignore[index]
                return f"the noise of {name} is not independent of that of {other}"
        previous = name
    return None


def _is_correlated(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    size = min(len(a[0]), len(b[0]))
    pairs = list(zip(a, b, strict=False))  # one parameter may have fewer draws
    x, y = (torch.cat([pair[side][:size] for pair in pairs]) for side in (0, 1))
    sizes = float(x.norm() * y.norm())
    # With fewer draws the tails are longer than the normal distribution's.
    return sizes > 0 and len(x) >= _FEWEST_DRAWS / 2 and abs(float(x @ y)) / sizes * math.sqrt(len(x)) > _MOST_SIGMAS
