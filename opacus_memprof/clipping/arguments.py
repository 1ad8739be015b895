# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of make_private and make_private_with_epsilon before anything is changed.

Also defines the meaning of two of them: `check` is a schedule of the steps to check, and `clipping` is a rule that
computes clip factors from per-sample gradient norms.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from opacus.accountants.utils import get_noise_multiplier
from torch.optim import Optimizer

from opacus_memprof.errors import MemprofError

Check = Literal["first", "sometimes", "always", "off"]
Nonfinite = Literal["refuse", "drop"]
Passes = Literal["auto", 1, 2]
CHECKS: tuple[Check, ...] = get_args(Check)

OWN_MODES = ("flash_clip", "auto")
ADAPTIVE = frozenset(
    ("target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound", "unclipped_num_std")
)
"""Arguments that opacus.optimizers.AdaClipDPOptimizer has in addition to those of DPOptimizer."""

_FREE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_Method = TypeVar("_Method", bound=Callable[..., Any])
Clipping = Literal["flat", "per_layer", "adaptive", "automatic"]
CLIPPINGS: tuple[Clipping, ...] = ("flat", "per_layer", "adaptive", "automatic")
_STABILITY = 1e-6  # as in Opacus
_AUTOMATIC_STABILITY = 0.01  # gamma in Bu et al. 2023, arXiv 2206.07136


def by_name(method: _Method) -> _Method:
    """Decorates an engine's method that takes keyword arguments only, as Opacus' methods do.

    The decorated method raises MemprofError for positional arguments, unknown names and options of another mode. The
    engine's `_extra_arguments(name, given)` returns names that are valid although the signature does not list them.
    """

    @functools.wraps(method)
    def checked(engine: Any, *args: Any, **given: Any) -> Any:
        name = method.__name__
        if args:
            raise MemprofError(
                f"{name} takes its arguments by name, but {len(args)} came by position: write module=..., "
                "optimizer=..., data_loader=... and so on."
            )
        listed = named_parameters(method)
        _refuse_unknown(name, given, listed | engine._extra_arguments(name, given), listed)
        _refuse_options_of_flash_clip(given)
        return method(engine, **given)

    return cast(_Method, checked)


def named_parameters(function: Callable[..., Any]) -> set[str]:
    """Returns the names of a function's parameters, without `self`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind not in _FREE} - {"self"}


def accountant_arguments(accountant: Any) -> set[str]:
    """Returns the names that make_private_with_epsilon passes to the search for the noise multiplier."""
    search = named_parameters(get_noise_multiplier) - {
        "target_epsilon", "target_delta", "sample_rate", "epochs", "steps", "accountant",
    }  # fmt: skip
    return search | named_parameters(accountant.get_epsilon) - {"delta", "args"}


def _refuse_unknown(name: str, given: Iterable[str], known: set[str], listed: set[str]) -> None:
    for each in given:
        if each in known:
            continue
        if each in ADAPTIVE:
            raise MemprofError(f"{each} belongs to clipping='adaptive': pass that, too, or leave out {each}.")
        close = difflib.get_close_matches(each, sorted(known), n=1)
        way_out = f"did you mean {close[0]}?" if close else f"its arguments are {', '.join(sorted(listed))}."
        raise MemprofError(f"{name} does not know the argument {each}: {way_out}")


def _refuse_options_of_flash_clip(given: Mapping[str, Any]) -> None:
    mode = given.get("grad_sample_mode", "hooks")
    if mode == "ghost_tp":
        raise MemprofError(
            "ghost_tp cannot be trained through Opacus' PrivacyEngine, which has no optimizer for it: use "
            "ghost_fsdp over several GPUs, or ghost"
        )
    own = [each for each in given if each.startswith("flash_clip_")]
    if own and mode not in OWN_MODES:
        raise MemprofError(
            f"{', '.join(own)} is for grad_sample_mode='flash_clip' or 'auto', but the mode is {mode!r}: leave it out, "
            "or pass one of these modes."
        )


def check_noise_multiplier(value: Any) -> None:
    """Raises MemprofError unless `value` is a finite number that is not negative."""
    number = _as_number(value)
    if not math.isfinite(number) or number < 0:
        raise MemprofError(
            f"noise_multiplier is {value!r}; it must be a finite number of at least 0: the ratio of the noise's "
            "standard deviation to max_grad_norm."
        )


def check_bound(value: Any, clipping: str) -> None:
    """Raises MemprofError unless `value` is positive and finite or, for "per_layer", a list of such numbers."""
    if clipping == "per_layer":
        if not isinstance(value, (list, tuple)) or not value or not all(map(is_bound, value)):
            raise MemprofError(
                f"max_grad_norm is {value!r}; clipping='per_layer' needs a list with one positive and finite "
                "number for each trainable parameter"
            )
    elif not is_bound(value):
        raise MemprofError(
            f"max_grad_norm is {value!r}; clipping={clipping!r} needs one positive and finite number: the "
            "standard deviation of the noise is proportional to it"
        )


def check_budget(target_epsilon: Any, target_delta: Any, epochs: Any) -> None:
    """Raises MemprofError unless noise can be searched for with this privacy budget: all three values are in range."""
    if not is_bound(target_epsilon):
        raise MemprofError(f"target_epsilon is {target_epsilon!r}; it must be a positive and finite number.")
    if not 0 < _as_number(target_delta) < 1:
        raise MemprofError(
            f"target_delta is {target_delta!r}; it must be between 0 and 1: less than 1 / (number of samples)."
        )
    if not is_bound(epochs):
        raise MemprofError(f"epochs is {epochs!r}; it must be a positive number: how long the budget has to last.")


def check_schedule(check: Check | None, mode: str) -> Check:
    """Returns the schedule of checks: `check`, or the mode's default if `check` is None.

    Raises:
        MemprofError: the schedule is unknown.
    """
    if check is None:
        return "sometimes" if mode in OWN_MODES else "off"
    if check not in CHECKS:
        raise MemprofError(f"check is {check!r}; it must be {', '.join(map(repr, CHECKS[:-1]))} or {CHECKS[-1]!r}.")
    return check


def check_nonfinite(nonfinite: Nonfinite) -> None:
    """Raises MemprofError unless `nonfinite` is "refuse" or "drop"."""
    if nonfinite not in get_args(Nonfinite):
        raise MemprofError(f"flash_clip_nonfinite is {nonfinite!r}; it must be 'refuse' or 'drop'.")


def check_passes(passes: Passes, name: str) -> None:
    """Raises MemprofError unless `passes` is "auto", 1 or 2. The message calls the argument `name`."""
    if passes not in get_args(Passes):
        raise MemprofError(f"{name} is {passes!r}; it must be 'auto', 1 or 2.")


def refuse_closures(optimizer: Optimizer) -> None:
    """Raises MemprofError if the optimizer needs several gradients within a step, or sparse ones."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise MemprofError(
            f"{name} computes gradients several times within a step, by a closure, and each of them would need noise "
            "of its own: use an optimizer whose step() works without a closure, such as SGD or Adam."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise MemprofError("SparseAdam needs sparse gradients, and noise makes them dense: use Adam.")


def check_same_reduction(of_optimizer: str, of_module: str) -> None:
    """Raises MemprofError unless the optimizer has the same loss_reduction as its module, which computes norms."""
    if of_optimizer != of_module:
        raise MemprofError(
            f"the optimizer has loss_reduction={of_optimizer!r} and its module {of_module!r}: pass the same to both."
        )


def check_expected_size(size: Any) -> None:
    """Raises MemprofError unless an expected batch size, by which a mean loss is divided, is positive and finite."""
    if not is_bound(size):
        raise MemprofError(
            f"the optimizer's expected_batch_size is {size!r}, and the gradients of a mean loss are divided by it: set "
            "optimizer.expected_batch_size to the number of samples that a batch has on average. (Opacus rounds that "
            "number down, for some loaders of one sample to 0.)"
        )


def is_bound(value: Any) -> bool:
    """Returns whether `value` is a finite positive number."""
    number = _as_number(value)
    return math.isfinite(number) and number > 0


def _as_number(value: Any) -> float:
    """Converts a number of any library to a float. Text, booleans and everything else become NaN."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        return math.nan


_LAST_POWER = 1024
_LATER = 1000


def is_checked(check: Check, step: int) -> bool:
    """Returns whether a logical step is checked.

    Args:
        check: the schedule. "sometimes" means steps 1, 2, 4, 8, ... 1024 and then every 1000th.
        step: the number of the step; the first is 1.
    """
    if check == "sometimes":
        return step & (step - 1) == 0 if step <= _LAST_POWER else step % _LATER == 0
    return check == "always" or (check == "first" and step == 1)


def is_explained(check: Check, step: int) -> bool:
    """Returns whether a step is compared with the gradients that its outputs explain.

    This happens when a step is checked, but with "sometimes" only in steps 1, 8, 64, 512 and then every 1000th, because
    it takes as long as a step.
    """
    return is_checked(check, step) and (check != "sometimes" or step % _LATER == 0 or (step.bit_length() - 1) % 3 == 0)


def has_sums_checked(check: Check, step: int) -> bool:
    """Returns whether the sums of a checked step are compared with autograd's.

    With "sometimes" this happens in every other check, except in explained steps, which show the same.
    """
    return check != "sometimes" or (step.bit_length() % 2 == 1 and not is_explained(check, step))


class ClipRule:
    """The rule by which gradients are clipped.

    Args:
        clipping: "flat" and "adaptive" clip the gradient of all parameters to one bound, "per_layer" clips that of each
            parameter to its own bound, and "automatic" normalizes all gradients to the bound (Bu et al. 2023, arXiv
            2206.07136).
        bound: the bound C; for "per_layer" one for each trainable parameter, in the optimizer's order.

    Attributes:
        bound: the bound of a sample's gradient; for "per_layer" the root of the sum of the squared bounds.
        bounds: for "per_layer" the bounds of the parameters; otherwise empty.

    Raises:
        MemprofError: the bound is not positive and finite, or not of the right kind.
    """

    bound: float
    bounds: list[float]
    _given: tuple[list[float], float]

    def __init__(self, clipping: Clipping, bound: float | Sequence[float]) -> None:
        if clipping not in CLIPPINGS:
            raise MemprofError(f"clipping is {clipping!r}; flash_clip knows {', '.join(map(repr, CLIPPINGS))}.")
        check_bound(bound, clipping)
        self.clipping = clipping
        self._set(bound)

    @property
    def by_parameter(self) -> bool:
        """Whether parameters have factors of their own."""
        return self.clipping == "per_layer"

    def set_bound(self, bound: float) -> None:
        """Changes the bound of a sample's gradient, and the bounds of parameters in the same ratio.

        Noise is proportional to `bound`: with unchanged bounds of parameters it would be too small after `bound` falls.

        Raises:
            MemprofError: the bound is not positive and finite.
        """
        if not is_bound(bound):
            raise MemprofError(f"max_grad_norm would become {bound!r}; give a positive and finite number.")
        bounds, given = self._given  # the given bounds, not the last ones, whose rounding errors would accumulate
        self.bound = float(bound)
        self.bounds = bounds.copy() if self.bound == given else [each * (self.bound / given) for each in bounds]

    def set_bounds(self, bounds: Sequence[float]) -> None:
        """Changes the bounds of parameters, and that of a sample's gradient with them.

        Raises:
            MemprofError: they are not as many positive and finite numbers as before, or clipping is not "per_layer".
        """
        if not self.by_parameter:
            raise MemprofError(
                f"max_grad_norms is for clipping='per_layer', and this is {self.clipping!r}: set max_grad_norm."
            )
        check_bound(bounds, self.clipping)
        if len(bounds) != len(self.bounds):
            raise MemprofError(
                f"max_grad_norms would become {len(bounds)} bounds, where there are {len(self.bounds)}: give one for "
                "each trainable parameter of the model."
            )
        self._set(bounds)

    def _set(self, bound: float | Sequence[float]) -> None:
        self.bounds = []
        if isinstance(bound, Sequence):
            self.bounds = [float(each) for each in bound]
            self.bound = math.hypot(*self.bounds)
        else:
            self.bound = float(bound)
        self._given = self.bounds, self.bound

    def values(self) -> tuple[str, float, list[float]]:
        """Returns the kind of clipping and the bounds."""
        return self.clipping, self.bound, self.bounds.copy()

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Returns the clip factors, [B], of gradients whose norms are `norms`, [B].

        They are min(1, C / norm), or C / (norm + 0.01) for "automatic". A gradient times its factor has a norm of at
        most C, which is the sensitivity of a sum of such gradients to one sample.
        """
        if self.clipping == "automatic":
            return self.bound / (norms + _AUTOMATIC_STABILITY)
        return (self.bound / (norms + _STABILITY)).clamp(max=1.0)

    def factors_of(self, index: int, norms: torch.Tensor) -> torch.Tensor:
        """Returns the clip factors, [B], for the gradients of the parameter at `index` in the optimizer."""
        return (self.bounds[index] / (norms + _STABILITY)).clamp(max=1.0)


class ClippingSettings:
    """The settings of a private optimizer that a program may change between two steps.

    Attributes:
        max_grad_norm: clipping bound. For clipping="per_layer" the root of the sum of the squared bounds: a new value
            changes all bounds by the same ratio.
        max_grad_norms: for clipping="per_layer" the bounds of the parameters. The noise follows them.
        noise_multiplier: the standard deviation of the noise, in units of `max_grad_norm`.

    Setting one raises MemprofError if the value is none, or if it is seen to come from samples.
    """

    bookkeeping: Any
    _module: Any

    @property
    def max_grad_norm(self) -> float:
        return float(self.bookkeeping.rule.bound)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._refuse_samples("max_grad_norm", [value], [self.max_grad_norm])
        self.set_bound(value)

    @property
    def max_grad_norms(self) -> tuple[float, ...]:
        rule = self.bookkeeping.rule
        if not rule.by_parameter:
            raise AttributeError("max_grad_norms are the bounds of clipping='per_layer'.")
        return tuple(rule.bounds)  # an element that is set would be lost in a list

    @max_grad_norms.setter
    def max_grad_norms(self, values: Sequence[float]) -> None:
        self._refuse_samples("max_grad_norms", values, self.bookkeeping.rule.bounds)
        self.bookkeeping.rule.set_bounds(values)
        self._own_rule = self.bookkeeping.rule.values()

    @property
    def noise_multiplier(self) -> float:
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if not (value >= 0 and math.isfinite(value)):
            raise MemprofError(f"noise_multiplier would become {value!r}; give a finite number that is not negative.")
        self._refuse_samples("noise_multiplier", [value], [getattr(self, "_noise_multiplier", value)])
        self._noise_multiplier = value

    def set_bound(self, value: float) -> None:
        """Changes the bound to one that the optimizer has found itself."""
        self.bookkeeping.rule.set_bound(value)
        self._own_rule = self.bookkeeping.rule.values()

    def check_own_rule(self) -> None:
        """Checks that the model is clipped by the rule that this optimizer has set.

        Raises:
            MemprofError: another optimizer of the model has set another one.
        """
        own, rule = self._own_rule, self.bookkeeping.rule
        if rule.values() != own:
            raise MemprofError(
                f"another optimizer was made for this model, with clipping={rule.clipping!r} and the bound "
                f"{rule.bound:g}, but this one has {own[0]!r} and {own[1]:g}: step the newer one, or give both the "
                "same bounds."
            )

    def _refuse_samples(self, name: str, values: Sequence[Any], now: Sequence[float]) -> None:
        if any(map(self._module.parts.are_from_samples, values, now)):
            raise MemprofError(
                f"{name} would become a number that was computed from the samples: from norms of their gradients, or "
                "from outputs or losses. Others would be clipped, and get noise, by what these samples are, which "
                "nothing bounds. Use clipping='adaptive', which counts norms with noise, a schedule, or public data."
            )


def check_trained(names: Mapping[Any, str], held: Sequence[Any], rule: ClipRule) -> None:
    """Checks that an optimizer holds just the parameters that the model trains.

    Args:
        names: the trained parameters of the model's last forward, with their names.
        held: the trained parameters that the optimizer holds.
        rule: how gradients are clipped.

    Raises:
        MemprofError: they are not the same, or not as many as the bounds of the rule.
    """
    in_optimizer = set(held)
    missing = [name for parameter, name in names.items() if parameter not in in_optimizer]
    if missing:
        raise MemprofError(
            f"{', '.join(missing)} can be trained but the optimizer does not hold them; freeze them with "
            "requires_grad_(False), or give them to the optimizer."
        )
    if len(held) > len(names):
        raise MemprofError(
            f"the optimizer holds {len(held) - len(names)} trained parameters that were not trained in the last "
            "forward of the model, or are not the model's: change what is trained before a forward, and give the "
            "optimizer parameters of this model alone."
        )
    if rule.by_parameter and len(rule.bounds) != len(held):
        raise MemprofError(
            f"max_grad_norm has {len(rule.bounds)} bounds, but the optimizer has {len(held)} parameters that are "
            "trained; clipping='per_layer' needs one for each: give as many bounds, and do not freeze or unfreeze "
            "parameters later."
        )
