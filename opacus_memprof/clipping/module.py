# SPDX-License-Identifier: Apache-2.0
"""The GradSampleModule and the GradSampleHooks of grad_sample_mode="flash_clip"."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from opacus_memprof.clipping.autograd_functions import GradientTap, TwoPassBackward, run_two_passes
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.validate import find_layers
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

Passes = Literal["auto", 1, 2]
DEFAULT_WORKSPACE_MB = 256.0


class FlashClipHooks(AbstractGradSampleHooks):  # type: ignore[misc]
    """The hooks of flash_clip on a model, without a wrapper around it.

    While a trainable layer runs, its parameters do not require grad, so that autograd forms no weight gradients, which
    differential privacy could not use. A ``GradientTap`` on the layer's output forms what is needed instead.

    Args:
        m: the model.
        batch_first: must be True.
        loss_reduction: "mean" or "sum", of the loss over the batch.
        strict: for compatibility with Opacus; unsupported layers are always refused.
        max_grad_norm: clipping bound.
        workspace_mb: ceiling, in MiB, on the temporaries of one layer's norm or clipped sum.
        passes: 1 keeps what the clipped sums need during a single backward; 2 keeps nothing, and runs backward through
            the model twice; "auto" is 1 unless what it keeps would not fit in device memory.

    Raises:
        MemprofError: the model or an argument is not supported.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        max_grad_norm: float = 1.0,
        workspace_mb: float = DEFAULT_WORKSPACE_MB,
        passes: Passes = "auto",
    ) -> None:
        if not batch_first:
            raise MemprofError("flash_clip needs batch_first=True: transpose the inputs so that the batch comes first.")
        if loss_reduction not in ("mean", "sum"):
            raise MemprofError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'.")
        if passes not in ("auto", 1, 2):
            raise MemprofError(f"flash_clip_passes is {passes!r}; it must be 'auto', 1 or 2.")
        if isinstance(max_grad_norm, (list, tuple)) or not max_grad_norm > 0:
            raise MemprofError(f"max_grad_norm is {max_grad_norm!r}; flash_clip clips flat: give one positive number.")
        bookkeeping = Bookkeeping(max_grad_norm, loss_reduction, Workspace.from_mib(workspace_mb))
        layers = find_layers(m)
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.bookkeeping = bookkeeping
        self.passes = passes
        self.layers = layers
        self.hooks_enabled = True
        self._anchors: dict[torch.device, torch.Tensor] = {}
        self._frozen: dict[Layer, list[nn.Parameter]] = {}
        self._kept_bytes = 0
        self._allocated_before = 0
        self.autograd_grad_sample_hooks: list[RemovableHandle] = []
        self._attach()

    @property
    def per_sample_gradient_norms(self) -> torch.Tensor:
        """[B] of the last batch. Not private: for debugging only."""
        if self.bookkeeping.norms is None:
            raise AttributeError("per_sample_gradient_norms is set by optimizer.step(), after forward and backward.")
        return self.bookkeeping.norms

    def parameter_names(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self._module.named_parameters() if p.requires_grad}

    def forbid_grad_accumulation(self) -> None:
        self.bookkeeping.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.bookkeeping.accumulation_allowed = True

    def disable_hooks(self) -> None:
        self.hooks_enabled = False

    def enable_hooks(self) -> None:
        self.hooks_enabled = True

    def remove_hooks(self) -> None:
        """Removes the hooks, and drops what backward has kept."""
        self.disable_hooks()
        while self.autograd_grad_sample_hooks:
            self.autograd_grad_sample_hooks.pop().remove()
        self.bookkeeping.clear()

    def _attach(self) -> None:
        handles = self.autograd_grad_sample_hooks
        for layer in self.layers:
            handles.append(layer.module.register_forward_pre_hook(functools.partial(self._before_layer, layer)))
            handles.append(
                layer.module.register_forward_hook(functools.partial(self._after_layer, layer), always_call=True)
            )
        handles.append(self._module.register_forward_pre_hook(self._before_model))
        handles.append(self._module.register_forward_hook(self._after_model))

    def _active(self, module: nn.Module) -> bool:
        return self.hooks_enabled and module.training and torch.is_grad_enabled()

    # --- a layer ---
    def _before_layer(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._active(module):
            return None
        x = layer.check_input(args[0] if args else None)
        self._frozen[layer] = layer.trainable()
        for parameter in self._frozen[layer]:
            parameter.requires_grad_(False)
        return (layer.cast(x), *args[1:])

    def _after_layer(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        # Also called if forward raises (then output is None), so that parameters always become trainable again.
        frozen = self._frozen.pop(layer, [])
        for parameter in frozen:
            parameter.requires_grad_(True)
        if not frozen or not isinstance(output, torch.Tensor):
            return None
        x = args[0]
        if self.passes == "auto" and output.is_cuda and layer.is_trainable("weight"):
            self._kept_bytes += layer.kept_bytes(x, output)
        saved_input = x.detach() if layer.is_trainable("weight") else None
        anchor = None if output.requires_grad else self._anchor(output.device)
        result: torch.Tensor = GradientTap.apply(output, anchor, saved_input, layer, self.bookkeeping)
        return result

    def _anchor(self, device: torch.device) -> torch.Tensor:
        """A scalar that makes an output require grad if neither the input nor (for now) the parameters do."""
        return self._anchors.setdefault(device, torch.zeros((), device=device, requires_grad=True))

    # --- the model ---
    def _before_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._active(module):
            self.bookkeeping.begin_pass()
            self._kept_bytes = 0
            if self.passes == "auto" and torch.cuda.is_available():
                self._allocated_before = torch.cuda.memory_allocated()

    def _after_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._active(module) or self.passes == 1:
            return output
        leaves, structure = tree_flatten(output)
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        scalar = next((leaf for leaf in (leaves[i] for i in indices) if leaf.dim() == 0), None)
        if self.passes == "auto" and (not indices or scalar is not None or self._one_pass_fits()):
            return output
        if scalar is not None:
            raise MemprofError(
                "flash_clip_passes=2 needs outputs whose first dimension is the batch, but the model returned a "
                "scalar: compute the loss outside the model, or use flash_clip_passes=1."
            )
        if not indices:
            return output
        inner = [leaves[i] for i in indices]
        outer = TwoPassBackward.apply(
            self._anchor(inner[0].device), inner, functools.partial(run_two_passes, self.bookkeeping)
        )
        for i, leaf in zip(indices, outer, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, structure)

    def _one_pass_fits(self) -> bool:
        """Whether what one pass keeps fits into device memory. Backward releases what forward has allocated, so only
        the bytes beyond that must be free."""
        if self._kept_bytes == 0:
            return True
        allocated = torch.cuda.memory_allocated()
        growth = self._kept_bytes - (allocated - self._allocated_before)
        if growth <= 0:
            return True
        free, _ = torch.cuda.mem_get_info()
        return growth <= free + torch.cuda.memory_reserved() - allocated


class GradSampleModuleFlashClip(FlashClipHooks, AbstractGradSampleModule):  # type: ignore[misc]
    """The hooks of flash_clip in a module that wraps the model. See FlashClipHooks for the arguments."""

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        FlashClipHooks.__init__(self, m, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
