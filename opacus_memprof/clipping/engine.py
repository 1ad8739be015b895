# SPDX-License-Identifier: Apache-2.0
"""Adds grad_sample_mode="flash_clip" to a PrivacyEngine."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer, get_optimizer_class
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus_memprof.clipping.agreement import inner_model, is_replicated, prepare_replicated, spans_ranks
from opacus_memprof.clipping.arguments import (
    ADAPTIVE,
    CLIPPINGS,
    Check,
    Nonfinite,
    Passes,
    accountant_arguments,
    by_name,
    check_bound,
    check_budget,
    check_noise_multiplier,
    check_nonfinite,
    check_schedule,
    named_parameters,
)
from opacus_memprof.clipping.cost import DEFAULT_WORKSPACE_MB
from opacus_memprof.clipping.modes import AUTO, make_private_automatically
from opacus_memprof.clipping.module.hooks import FlashClipHooks, GradSampleModuleFlashClip
from opacus_memprof.clipping.optimizers import optimizer_class
from opacus_memprof.clipping.proof.certificate import Certificate, EngineRecord
from opacus_memprof.clipping.proof.opacus_modes import check_steps, refuse_check
from opacus_memprof.clipping.sampling import DrawnBatches, sample_every_step
from opacus_memprof.errors import MemprofError

MODE = "flash_clip"


class FlashClipEngineMixin:
    """Adds flash_clip to a PrivacyEngine: `class Engine(FlashClipEngineMixin, opacus.PrivacyEngine)`.

    `make_private` and `make_private_with_epsilon` then accept `grad_sample_mode="flash_clip"` and return (module,
    optimizer, data_loader) as for "hooks"; the training loop is the same. `"auto"` picks flash_clip, ghost or hooks
    (docs/flash_clip.md). Other modes are passed to Opacus; `check` applies to them, too.
    """

    _own_options: dict[str, Any] | None = None  # options of make_private_with_epsilon, while it calls make_private
    _flash_clip_options: dict[str, Any] | None = None
    _flash_clip_module: FlashClipHooks | None = None

    @cached_property
    def _record(self) -> EngineRecord:
        return EngineRecord()

    @by_name
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        flash_clip_workspace_mb: float = DEFAULT_WORKSPACE_MB,
        flash_clip_passes: Passes = "auto",
        flash_clip_nonfinite: Nonfinite = "refuse",
        check: Check | None = None,
        **kwargs: Any,
    ) -> Any:
        """Makes a model, its optimizer and its data loader private, as `opacus.PrivacyEngine.make_private` does.

        The gradient of each sample is clipped to the norm `max_grad_norm`, which is then the sensitivity of their sum.
        Noise with the standard deviation `noise_multiplier * max_grad_norm` is added to the sum (Abadi et al. 2016,
        arXiv 1607.00133).

        Args:
            module: the model.
            optimizer: its optimizer.
            criterion: the loss, for "ghost", "ghost_fsdp" and "auto"; None is Opacus' default.
            data_loader: the batches.
            noise_multiplier: the standard deviation of the noise, divided by `max_grad_norm`.
            max_grad_norm: the bound of a sample's gradient; for "per_layer", a list with one for each parameter.
            batch_first: see Opacus.
            loss_reduction: "mean" or "sum", of the loss over the batch.
            poisson_sampling: see Opacus.
            clipping: "flat", "per_layer", "adaptive" or, for flash_clip, "automatic".
            noise_generator: the generator of the noise.
            grad_sample_mode: a mode of Opacus, "flash_clip" or "auto".
            wrap_model: False returns hooks instead of a module that wraps the model.
            rand_on_empty: see Opacus.
            flash_clip_workspace_mb: limit on the temporaries of one layer's norm or clipped sum, in MiB.
            flash_clip_passes: 1, 2 or "auto"; see FlashClipHooks.
            flash_clip_nonfinite: "refuse" raises MemprofError at a step with a sample whose gradient has NaN or
                infinite elements; "drop" leaves such samples out of the clipped sum and counts them.
            check: which steps are compared with clipping by hand: "first", "sometimes" (steps 1, 2, 4, ... 1024, then
                every 1000th), "always" or "off". The default is "sometimes" for flash_clip and "auto", otherwise "off".
            kwargs: the arguments of `clipping="adaptive"`; see opacus.optimizers.AdaClipDPOptimizer.

        Returns:
            (module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) for "ghost" and
            "ghost_fsdp", and for "auto" if a criterion was given.

        Raises:
            MemprofError: an argument is wrong, or the mode cannot clip the model exactly. The model is then unchanged.
        """
        check_noise_multiplier(noise_multiplier)
        check_bound(max_grad_norm, clipping)
        own = self._own_options or _own_options(
            grad_sample_mode, flash_clip_workspace_mb, flash_clip_passes, flash_clip_nonfinite, check
        )
        if self._own_options is not None:
            unused = accountant_arguments(self.accountant)  # type: ignore[attr-defined]
            kwargs = {name: value for name, value in kwargs.items() if name not in unused}
        given = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": data_loader,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "batch_first": batch_first,
            "loss_reduction": loss_reduction,
            "poisson_sampling": poisson_sampling,
            "clipping": clipping,
            "noise_generator": noise_generator,
            "grad_sample_mode": grad_sample_mode,
            "wrap_model": wrap_model,
            "rand_on_empty": rand_on_empty,
            **kwargs,
        }
        if criterion is not None:
            given["criterion"] = criterion
        return self._make_private(given, own)

    @by_name
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        flash_clip_workspace_mb: float = DEFAULT_WORKSPACE_MB,
        flash_clip_passes: Passes = "auto",
        flash_clip_nonfinite: Nonfinite = "refuse",
        check: Check | None = None,
        **kwargs: Any,
    ) -> Any:
        """Makes a model private as `make_private` does, with the noise that a privacy budget allows; see Opacus.

        Args:
            module: the model.
            optimizer: its optimizer.
            criterion: as for `make_private`.
            data_loader: the batches.
            target_epsilon: the budget's epsilon after `epochs`.
            target_delta: the budget's delta.
            epochs: how many epochs are trained.
            max_grad_norm: as for `make_private`.
            batch_first: see Opacus.
            loss_reduction: "mean" or "sum", of the loss over the batch.
            poisson_sampling: see Opacus.
            clipping: as for `make_private`.
            noise_generator: the generator of the noise.
            grad_sample_mode: as for `make_private`.
            wrap_model: as for `make_private`.
            flash_clip_workspace_mb: as for `make_private`.
            flash_clip_passes: as for `make_private`.
            flash_clip_nonfinite: as for `make_private`.
            check: as for `make_private`.
            kwargs: `rand_on_empty`, the arguments of `clipping="adaptive"`, and those of the search for the noise:
                `epsilon_tolerance`, and what the accountant's `get_epsilon` takes ("prv": `eps_error` and
                `delta_error`; "rdp": `alphas`; "gdp": `poisson`).

        Returns:
            As `make_private`.

        Raises:
            MemprofError: as `make_private`.
        """
        check_bound(max_grad_norm, clipping)
        check_budget(target_epsilon, target_delta, epochs)
        # Stored on the engine, because Opacus would pass unknown keywords to the accountant as well.
        self._own_options = _own_options(
            grad_sample_mode, flash_clip_workspace_mb, flash_clip_passes, flash_clip_nonfinite, check
        )
        try:
            return super().make_private_with_epsilon(  # type: ignore[misc]
                module=module,
                optimizer=optimizer,
                criterion=criterion,
                data_loader=data_loader,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                epochs=epochs,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                **kwargs,
            )
        finally:
            self._own_options = None

    def privacy_check(self) -> dict[str, Any]:
        """Returns what has been proved about the models that this engine made private.

        This is the content of privacy_check.json (docs/flash_clip.md).

        Raises:
            MemprofError: nothing has been made private.
        """
        if not self._record.models:
            raise MemprofError("there is nothing to report: call make_private before privacy_check.")
        return self._record.to_data()

    def _extra_arguments(self, name: str, given: Mapping[str, Any]) -> set[str]:
        """Returns the names that `make_private` or `make_private_with_epsilon` accepts in `kwargs`."""
        names = named_parameters(getattr(super(), name))
        if given.get("clipping") == "adaptive":
            names |= ADAPTIVE
        if name == "make_private_with_epsilon":
            names.add("rand_on_empty")
        if name == "make_private_with_epsilon" or self._own_options is not None:
            names |= accountant_arguments(self.accountant)  # type: ignore[attr-defined]
        return names

    def _make_private(self, given: dict[str, Any], own: dict[str, Any]) -> Any:
        """Makes a model private.

        Args:
            given: the arguments of Opacus' make_private.
            own: the options of flash_clip, and "check".
        """
        mode = given["grad_sample_mode"]
        if mode == AUTO:
            return make_private_automatically(
                partial(FlashClipEngineMixin._make_private, self, own=own), given, own["workspace_mb"]
            )
        if mode != MODE:
            _refuse_clipping(given["clipping"], mode, spans_ranks(given["module"]))
            if own["check"] != "off":
                refuse_check(given, own["check"])
            prepared = super().make_private(**given)  # type: ignore[misc]
            certificate = _certificate_of_mode(mode, prepared, given, own["check"])
            if own["check"] != "off":
                check_steps(prepared, given, own["check"], certificate)
            self._record.models.append(certificate)
            return prepared
        self._flash_clip_options = {**own, "clipping": given["clipping"]}
        try:
            prepared = super().make_private(**given)  # type: ignore[misc]
            assert self._flash_clip_module is not None
            self._record.models.append(self._flash_clip_module.certificate)
            optimizer, loader = prepared[1], prepared[-1]
            if isinstance(loader, DPDataLoader):
                optimizer.drawn = DrawnBatches.of(loader)
            return prepared
        except BaseException:
            if self._flash_clip_module is not None:
                self._flash_clip_module.cleanup()
            raise
        finally:
            self._flash_clip_module = self._flash_clip_options = None

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
        known = named_parameters(FlashClipHooks.__init__)
        options = {name: value for name, value in (self._flash_clip_options or {}).items() if name in known}
        self._flash_clip_module = cls(module, **kwargs, **options)
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
        return optimizer_class(clipping, distributed, self._flash_clip_module.registry.is_sharded)(
            optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            module=self._flash_clip_module,
            generator=self.secure_rng if secure else noise_generator,  # type: ignore[attr-defined]
            secure_mode=secure,
            **kwargs,
        )


def _refuse_clipping(clipping: str, mode: str, distributed: bool) -> None:
    """Raises MemprofError if Opacus has no optimizer for this clipping in this mode, before it changes the model."""
    try:
        get_optimizer_class(clipping, distributed, mode)
    except ValueError as error:
        raise MemprofError(
            f"clipping={clipping!r} does not go with grad_sample_mode={mode!r} here: use clipping='flat', or "
            f"grad_sample_mode='flash_clip', which knows {', '.join(map(repr, CLIPPINGS))}."
        ) from error


def _certificate_of_mode(mode: str, prepared: Any, given: Mapping[str, Any], check: Check) -> Certificate:
    """Returns the record of a model that Opacus made private in one of its own modes."""
    module, optimizer = given["module"], prepared[1]
    model = module._module if isinstance(module, AbstractGradSampleModule) else module
    certificate = Certificate(mode, inner_model(model), check, counts_steps=check != "off")
    bounds = given["max_grad_norm"] if given["clipping"] == "per_layer" else []
    certificate.describe_clipping(
        given["clipping"], bounds, optimizer.max_grad_norm, optimizer.noise_multiplier, given["loss_reduction"]
    )
    return certificate


def _own_options(
    mode: str, workspace_mb: float, passes: Passes, nonfinite: Nonfinite, check: Check | None
) -> dict[str, Any]:
    check_nonfinite(nonfinite)
    return {
        "workspace_mb": workspace_mb,
        "passes": passes,
        "nonfinite": nonfinite,
        "check": check_schedule(check, mode),
    }
