# SPDX-License-Identifier: Apache-2.0
"""Applies a suggestion's changes in the process of a planned run, if the program need not be edited for them.

Also records the settings of Opacus. Imports Opacus, which the program has imported by then.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import opacus
import torch
from opacus.utils import batch_memory_manager
from opacus.utils.batch_memory_manager import BatchMemoryManager, wrap_data_loader
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.checkpoint import checkpoint

from opacus_memprof.clipping import FlashClipEngineMixin, adopt_grad_samples, register_norm_samplers

_TWO_PASSES = ("ghost", "ghost_fsdp")  # their make_private also returns the criterion


class OpacusSetup:
    """Wraps make_private and BatchMemoryManager of Opacus before the program uses them.

    Args:
        changes: actions of a suggestion, and `drawn_batch`, the size of all batches that Poisson sampling draws;
            `allocator_setting` is not applied here.

    Attributes:
        poisson: "samples", "rate" and "steps" of the last loader that draws batch sizes; {} without one.
    """

    def __init__(self, changes: Sequence[Mapping[str, Any]]) -> None:
        self.poisson: dict[str, Any] = {}
        values = {change["kind"]: change.get("value", True) for change in changes}
        self._mode: str | None = values.get("grad_sample_mode")
        self._physical: int | None = values.get("max_physical_batch_size")
        self._drops_gradients = "drop_gradients" in values
        self._sets_to_none = "set_to_none" in values
        self._data_type: str | None = values.get("dtype")
        self._has_sgd = "optimizer" in values
        self._units = [name for change in changes if change["kind"] == "checkpoint" for name in change["modules"]]
        if "drawn_batch" in values:
            _fix_drawn_batches(values["drawn_batch"])
        if "adopt_grad_samples" in values:
            adopt_grad_samples()
        if "register_norm_samplers" in values:
            register_norm_samplers()
        original = opacus.PrivacyEngine.make_private

        @functools.wraps(original)
        def make_private(engine: Any, **kwargs: Any) -> Any:
            return self._changed(original, engine, kwargs)

        opacus.PrivacyEngine.make_private = make_private
        if self._physical is not None:
            self._limit_manager(self._physical)

    def _changed(self, original: Any, engine: Any, kwargs: dict[str, Any]) -> Any:
        before = kwargs.get("grad_sample_mode", "hooks")
        mode = self._mode or before
        if mode == "flash_clip" and not isinstance(engine, FlashClipEngineMixin):
            engine.__class__ = type("PrivacyEngine", (FlashClipEngineMixin, type(engine)), {})
        if self._data_type is not None:
            _convert(kwargs["module"], getattr(torch, self._data_type))
        if self._units:
            _checkpoint(kwargs["module"], self._units, reentrant=mode != "flash_clip")
        if self._has_sgd:
            groups = kwargs["optimizer"].param_groups
            kwargs["optimizer"] = torch.optim.SGD([{"params": each["params"], "lr": each["lr"]} for each in groups])
        prepared = list(original(engine, **{**kwargs, "grad_sample_mode": mode}))
        if before in _TWO_PASSES and mode not in _TWO_PASSES:
            prepared.insert(2, kwargs["criterion"])
        module, optimizer, loader = prepared[0], prepared[1], prepared[-1]
        self._note_sampling(loader)
        if self._drops_gradients:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        if self._sets_to_none:
            zero_grad = optimizer.zero_grad
            optimizer.zero_grad = lambda set_to_none=True: zero_grad(True)
        if self._physical is not None:
            prepared[-1] = wrap_data_loader(data_loader=loader, max_batch_size=self._physical, optimizer=optimizer)
        return tuple(prepared)

    def _limit_manager(self, physical: int) -> None:
        """Limits physical batches of BatchMemoryManager. If its loader is split already, the smaller size counts."""
        enter = BatchMemoryManager.__enter__

        def __enter__(manager: Any) -> Any:  # noqa: N807
            # The loader that make_private returned is split already.
            split = isinstance(manager.data_loader.batch_sampler, batch_memory_manager.BatchSplittingSampler)
            return manager.data_loader if split else enter(manager)

        BatchMemoryManager.__enter__ = __enter__

    def _note_sampling(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        rate = getattr(sampler, "sample_rate", None)
        if rate is not None:
            self.poisson = {"samples": len(loader.dataset), "rate": float(rate), "steps": len(loader)}


def _convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Converts a model, and what it is called with."""

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def convert(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(converted, arguments)), {name: converted(value) for name, value in named.items()}

    module.to(dtype).register_forward_pre_hook(convert, with_kwargs=True)


def _checkpoint(module: Any, units: Sequence[str], *, reentrant: bool) -> None:
    """Puts activation checkpoints around parts of a model, as its own method does if it has one."""
    if hasattr(module, "gradient_checkpointing_enable"):
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return
    for name in units:
        unit = module.get_submodule(name)
        unit.forward = functools.partial(_checkpointed, unit.forward, reentrant=reentrant)


def _checkpointed(forward: Callable[..., Any], *arguments: Any, reentrant: bool, **named: Any) -> Any:
    """Calls a forward in a checkpoint. A reentrant one takes no arguments by name."""
    return checkpoint(functools.partial(forward, **named), *arguments, use_reentrant=reentrant)


def _fix_drawn_batches(size: int) -> None:
    """Makes Poisson sampling draw this many samples for every batch, always the same ones."""

    def __iter__(sampler: Any) -> Iterator[list[int]]:  # noqa: N807
        yield from (list(range(min(size, sampler.num_samples))) for _ in range(sampler.steps))

    UniformWithReplacementSampler.__iter__ = __iter__
