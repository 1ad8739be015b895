# SPDX-License-Identifier: Apache-2.0
"""Adds grad_sample_mode="flash_clip" to Opacus' own functions, for programs that call them, such as trainers."""

import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import opacus.grad_sample.utils
import opacus.optimizers
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from opacus_memprof.clipping.agreement import is_replicated, prepare_replicated, spans_ranks
from opacus_memprof.clipping.arguments import (
    ADAPTIVE,
    CLIPPINGS,
    Check,
    ClipRule,
    Nonfinite,
    Passes,
    check_bound,
    check_noise_multiplier,
    check_nonfinite,
    check_passes,
    check_schedule,
    named_parameters,
)
from opacus_memprof.clipping.cost import DEFAULT_WORKSPACE_MB
from opacus_memprof.clipping.module.attached_hooks import find_owner
from opacus_memprof.clipping.module.hooks import FlashClipHooks, GradSampleModuleFlashClip
from opacus_memprof.clipping.optimizers import optimizer_class
from opacus_memprof.clipping.optimizers.ddp import DPOptimizerFlashClipDDP
from opacus_memprof.clipping.optimizers.fsdp import DPOptimizerFlashClipFSDP
from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip
from opacus_memprof.clipping.proof.certificate import EngineRecord
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

MODE = "flash_clip"

_options: dict[str, Any] = {}  # arguments of register()
_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}  # function of Opacus -> ours

made_private: deque[EngineRecord] = deque(maxlen=1024)
"""What was proved of the models that have an optimizer, of which a session writes the models of its time."""


def register(
    *,
    workspace_mb: float = DEFAULT_WORKSPACE_MB,
    passes: Passes = "auto",
    nonfinite: Nonfinite = "refuse",
    check: Check = "sometimes",
) -> None:
    """Adds `grad_sample_mode="flash_clip"` to Opacus' own functions.

    Afterwards `prepare_module`, `wrap_model`, `get_gsm_class` and `get_optimizer_class` of Opacus accept the mode, and
    so does `opacus.PrivacyEngine().make_private`. The optimizer's class finds the module from its parameters, and the
    module clips to the optimizer's `max_grad_norm`. Other modes do not change. Another call only changes the options.

    The functions are replaced in the namespaces of all imported modules, so that an earlier `from opacus.optimizers
    import get_optimizer_class` is covered, too. References that a program keeps elsewhere, such as in a class, a
    default argument or a `functools.partial`, remain Opacus' functions. For Poisson sampling over several ranks use
    `opacus_memprof.PrivacyEngine`: with Opacus' own engine a rank skips its empty batches, and the others wait for it.

    Args:
        workspace_mb: limit on the temporaries of one layer's norm or clipped sum, in MiB.
        passes: 1, 2 or "auto"; see FlashClipHooks.
        nonfinite: "refuse" or "drop"; see FlashClipEngineMixin.make_private.
        check: which steps are checked; see FlashClipEngineMixin.make_private.

    Raises:
        MemprofError: an option is wrong.
    """
    Workspace.from_mib(workspace_mb)
    check_nonfinite(nonfinite)
    check_passes(passes, "passes")
    given = {
        "workspace_mb": workspace_mb,
        "passes": passes,
        "nonfinite": nonfinite,
        "check": check_schedule(check, MODE),
    }
    _options.clear()
    _options.update(given)
    if _replaced:
        return
    utils = opacus.grad_sample.utils
    _replaced[utils.get_gsm_class] = _knows_class(utils.get_gsm_class, RegisteredFlashClipModule)
    _replaced[utils.get_hooks_class] = _knows_class(utils.get_hooks_class, RegisteredFlashClipHooks)
    _replaced[opacus.optimizers.get_optimizer_class] = _knows_optimizer(opacus.optimizers.get_optimizer_class)
    _replace_everywhere(_replaced)


def unregister() -> None:
    """Restores Opacus' functions in all modules. Existing models and optimizers of flash_clip keep working."""
    _replace_everywhere({ours: original for original, ours in _replaced.items()})
    _replaced.clear()


def _replace_everywhere(new: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replaces functions in the namespaces of all imported modules."""
    by_id = {id(old): function for old, function in new.items()}
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) and module.__name__ != __name__ else {}
        for name, value in list(names.items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def _knows_class(original: Callable[[str], Any], cls: type) -> Callable[[str], Any]:
    @functools.wraps(original)
    def get_class(grad_sample_mode: str) -> Any:
        return cls if grad_sample_mode == MODE else original(grad_sample_mode)

    return get_class


def _knows_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> Any:
        if grad_sample_mode != MODE:
            return original(clipping=clipping, distributed=distributed, grad_sample_mode=grad_sample_mode)
        return registered_optimizer_class(clipping, distributed)

    return get_optimizer_class


class RegisteredFlashClipHooks(FlashClipHooks):
    """The hooks that `prepare_module` returns for flash_clip and wrap_model=False."""

    def __init__(self, m: nn.Module, **given: Any) -> None:
        super().__init__(m, **_with_options(m, given))
        if is_replicated(m):
            prepare_replicated(m)


class RegisteredFlashClipModule(GradSampleModuleFlashClip):
    """The module that `prepare_module` and `wrap_model` return for flash_clip."""

    def __init__(self, m: nn.Module, **given: Any) -> None:
        super().__init__(m, **_with_options(m, given))
        if is_replicated(m):
            prepare_replicated(m)


def _with_options(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    if not model.training and any(isinstance(each, _NormBase) for each in model.modules()):
        raise MemprofError(
            f"{type(model).__name__} is in evaluation mode, where its normalization layers do not show whether they "
            "mix the samples of a batch: call train() before it is wrapped, and then eval() on frozen layers."
        )
    known = named_parameters(FlashClipHooks.__init__)
    return {name: value for name, value in _options.items() if name in known} | given


class _FindsModule:
    """Lets an optimizer of flash_clip accept the arguments of Opacus' optimizers, which have no module."""

    clipping: Any = "flat"
    original_optimizer: Optimizer

    def __new__(cls, optimizer: Optimizer, **given: Any) -> Any:
        """Returns an optimizer for shards if the parameters are sharded. `get_optimizer_class` cannot know this."""
        if (
            optimizer is not None
            and not issubclass(cls, DPOptimizerFlashClipFSDP)
            and _owner(optimizer).registry.is_sharded
        ):
            made = object.__new__(_registered_class(cls.clipping, DPOptimizerFlashClipFSDP))
            type(made).__init__(made, optimizer, **given)
            return made
        return object.__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: Any = None,
        secure_mode: bool = False,
        **given: Any,
    ) -> None:
        check_noise_multiplier(noise_multiplier)
        check_bound(max_grad_norm, self.clipping)
        unknown = set(given) - (ADAPTIVE if self.clipping == "adaptive" else set())
        if unknown:
            raise MemprofError(
                f"{type(self).__name__} does not know the argument {min(unknown)}: options of flash_clip are arguments "
                "of opacus_memprof.clipping.register()."
            )
        hooks = _owner(optimizer)
        if spans_ranks(hooks._module) and not isinstance(self, DPOptimizerFlashClipDDP | DPOptimizerFlashClipFSDP):
            raise MemprofError(
                "the model is trained on several ranks, but this optimizer is for one: call get_optimizer_class with "
                "distributed=True."
            )
        rule = ClipRule(self.clipping, max_grad_norm)
        if rule.by_parameter:
            if hooks.passes == 2:
                raise MemprofError("passes=2 finds one clip factor for all parameters; use 1 with 'per_layer'.")
            hooks.passes = 1
        if any(each.clipped for each in hooks.bookkeeping.backward_passes()):
            raise MemprofError(
                "the model's gradients were clipped in two passes before this optimizer was made, which has the bound: "
                "make the optimizer before the first backward."
            )
        hooks.bookkeeping.rule = rule
        super().__init__(  # type: ignore[call-arg]
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            module=hooks,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **given,
        )
        if not any(hooks.certificate in each.models for each in made_private):
            made_private.append(EngineRecord())
            made_private[-1].models.append(hooks.certificate)


def registered_optimizer_class(clipping: str, distributed: bool) -> type[DPOptimizerFlashClip]:
    """Returns the optimizer class, as `get_optimizer_class` does.

    Raises:
        MemprofError: flash_clip does not support the clipping, or does not support it on several ranks.
    """
    if clipping not in CLIPPINGS:
        raise MemprofError(f"clipping is {clipping!r}; flash_clip knows {', '.join(map(repr, CLIPPINGS))}.")
    base: Any = optimizer_class(clipping, distributed)  # mypy takes its objects for unhashable
    return _registered_class(clipping, base)


@functools.cache
def _registered_class(clipping: str, base: type[DPOptimizerFlashClip]) -> type[DPOptimizerFlashClip]:
    return type(f"Registered{base.__name__}", (_FindsModule, base), {"clipping": clipping})


def _owner(optimizer: Optimizer) -> FlashClipHooks:
    hooks: FlashClipHooks = find_owner(
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    )
    return hooks
