# SPDX-License-Identifier: Apache-2.0
"""Adds grad_sample_mode="flash_clip" to a PrivacyEngine."""

from __future__ import annotations

from functools import partial
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from opacus_memprof.clipping.automatic import AUTO, make_private_automatically
from opacus_memprof.clipping.distributed import is_replicated, prepare_replicated
from opacus_memprof.clipping.module import DEFAULT_WORKSPACE_MB, FlashClipHooks, GradSampleModuleFlashClip, Passes
from opacus_memprof.clipping.optimizer import DPOptimizerFlashClip, DPOptimizerFlashClipAdaptive
from opacus_memprof.clipping.optimizer_ddp import DPOptimizerFlashClipDDP
from opacus_memprof.clipping.optimizer_fsdp import DPOptimizerFlashClipFSDP
from opacus_memprof.clipping.sampler import sample_every_step
from opacus_memprof.errors import MemprofError

MODE = "flash_clip"


class FlashClipEngineMixin:
    """Adds flash_clip to a PrivacyEngine: ``class Engine(FlashClipEngineMixin, opacus.PrivacyEngine)``.

    ``make_private`` and ``make_private_with_epsilon`` then accept ``grad_sample_mode="flash_clip"`` and return
    (module, optimizer, data_loader) as for "hooks"; the training loop is the same. ``"auto"`` picks flash_clip, ghost
    or hooks (docs/flash_clip.md). Other modes are passed to Opacus.
    """

    _flash_clip_options: dict[str, Any] | None = None
    _flash_clip_module: FlashClipHooks | None = None

    def make_private(
        self,
        *,
        flash_clip_workspace_mb: float = DEFAULT_WORKSPACE_MB,
        flash_clip_passes: Passes = "auto",
        **kwargs: Any,
    ) -> Any:
        """As opacus.PrivacyEngine.make_private.

        Args:
            flash_clip_workspace_mb: ceiling, in MiB, on the temporaries of one layer's norm or clipped sum.
            flash_clip_passes: 1, 2 or "auto"; see FlashClipHooks.

        Raises:
            MemprofError: flash_clip cannot clip the model exactly, which is then unchanged.
        """
        if kwargs.get("grad_sample_mode") == AUTO:
            own = self._flash_clip_options or {"workspace_mb": flash_clip_workspace_mb, "passes": flash_clip_passes}
            given = {f"flash_clip_{name}": value for name, value in own.items()}
            make_private = partial(FlashClipEngineMixin.make_private, self, **given)
            return make_private_automatically(make_private, kwargs, own["workspace_mb"])
        if kwargs.get("grad_sample_mode") != MODE:
            return super().make_private(**kwargs)  # type: ignore[misc]
        if self._flash_clip_options is None:
            self._flash_clip_options = {"workspace_mb": flash_clip_workspace_mb, "passes": flash_clip_passes}
        self._flash_clip_options["clipping"] = kwargs.get("clipping", "flat")
        try:
            return super().make_private(**kwargs)  # type: ignore[misc]
        except BaseException:
            if self._flash_clip_module is not None:
                self._flash_clip_module.cleanup()
            raise
        finally:
            self._flash_clip_module = self._flash_clip_options = None

    def make_private_with_epsilon(
        self,
        *,
        flash_clip_workspace_mb: float = DEFAULT_WORKSPACE_MB,
        flash_clip_passes: Passes = "auto",
        **kwargs: Any,
    ) -> Any:
        """As opacus.PrivacyEngine.make_private_with_epsilon, with the options of ``make_private``."""
        if kwargs.get("grad_sample_mode") == AUTO:
            kwargs.setdefault("criterion", None)  # Opacus would pass a default one on
        # Stored, because Opacus would pass unknown keywords to the accountant as well.
        self._flash_clip_options = {"workspace_mb": flash_clip_workspace_mb, "passes": flash_clip_passes}
        try:
            return super().make_private_with_epsilon(**kwargs)  # type: ignore[misc]
        finally:
            self._flash_clip_options = None

    def _prepare_model(
        self, module: nn.Module, *, grad_sample_mode: str, wrap_model: bool = True, **kwargs: Any
    ) -> Any:
        if grad_sample_mode != MODE:
            return super()._prepare_model(  # type: ignore[misc]
                module, grad_sample_mode=grad_sample_mode, wrap_model=wrap_model, **kwargs
            )
        if isinstance(module, AbstractGradSampleModule):
            raise MemprofError("the module was made private already; pass the model that it wraps.")
        if not module.training:
            raise MemprofError("the model must be in training mode: call train() before make_private.")
        cls = GradSampleModuleFlashClip if wrap_model else FlashClipHooks
        self._flash_clip_module = cls(module, **kwargs, **(self._flash_clip_options or {}))
        if is_replicated(module):
            prepare_replicated(module)
        return self._flash_clip_module

    def _prepare_data_loader(self, data_loader: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_data_loader(data_loader, **kwargs)  # type: ignore[misc]
        if self._flash_clip_module is not None:
            sample_every_step(prepared.batch_sampler)
        return prepared

    def _prepare_optimizer(
        self,
        *,
        optimizer: Optimizer,
        grad_sample_mode: str = "hooks",
        noise_generator: Any = None,
        clipping: str = "flat",
        distributed: bool = False,
        **kwargs: Any,
    ) -> Any:
        if grad_sample_mode != MODE:
            return super()._prepare_optimizer(  # type: ignore[misc]
                optimizer=optimizer,
                grad_sample_mode=grad_sample_mode,
                noise_generator=noise_generator,
                clipping=clipping,
                distributed=distributed,
                **kwargs,
            )
        assert self._flash_clip_module is not None  # Opacus prepares the model first
        secure: bool = self.secure_mode  # type: ignore[attr-defined]
        return _optimizer_class(clipping, distributed, self._flash_clip_module.units.is_sharded)(
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            module=self._flash_clip_module,
            generator=self.secure_rng if secure else noise_generator,  # type: ignore[attr-defined]
            secure_mode=secure,
            **kwargs,
        )


def _optimizer_class(clipping: str, distributed: bool, is_sharded: bool) -> type[DPOptimizerFlashClip]:
    if clipping == "adaptive":
        if distributed:
            raise MemprofError("clipping='adaptive' trains on one device, as in Opacus; use 'flat' on several.")
        return DPOptimizerFlashClipAdaptive
    if is_sharded:
        return DPOptimizerFlashClipFSDP
    return DPOptimizerFlashClipDDP if distributed else DPOptimizerFlashClip
