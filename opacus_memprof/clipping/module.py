# SPDX-License-Identifier: Apache-2.0
"""The GradSampleModule and the GradSampleHooks of grad_sample_mode="flash_clip"."""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Literal

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from opacus_memprof.clipping.autograd_functions import (
    TwoPassBackward,
    is_compiled_autograd_enabled,
    run_two_passes,
)
from opacus_memprof.clipping.bookkeeping import Bookkeeping, Nonfinite
from opacus_memprof.clipping.distributed import inner_model, let_reducer_run
from opacus_memprof.clipping.layer_hooks import LayerHooks, Layout, PlainLayer, first_input, plain_layers
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.probe import CannotRunError, Probe
from opacus_memprof.clipping.repetition import is_repeating
from opacus_memprof.clipping.rules import Clipping, ClipRule
from opacus_memprof.clipping.sharded import SharedSamples, refuse_context_parallel
from opacus_memprof.clipping.units import Units
from opacus_memprof.clipping.validate import refuse_capture
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

Passes = Literal["auto", 1, 2]
DEFAULT_WORKSPACE_MB = 256.0


class FlashClipHooks(AbstractGradSampleHooks):  # type: ignore[misc]
    """The hooks of flash_clip on a model, without a wrapper around it.

    While a trainable layer runs, its parameters do not require grad, so that autograd forms no weight gradients, which
    differential privacy could not use. A node on the layer's output (``tap_gradient``) passes on what is needed.

    Args:
        m: the model.
        batch_first: must be True.
        loss_reduction: "mean" or "sum", of the loss over the batch.
        strict: for compatibility with Opacus; unsupported layers are always refused.
        max_grad_norm: the bound of a sample's gradient, or one for each parameter; see ClipRule.
        clipping: how the bound is applied; see ClipRule.
        workspace_mb: ceiling, in MiB, on the temporaries of one layer's norm or clipped sum.
        passes: 1 keeps what the clipped sums need during a single backward; 2 keeps nothing, and runs backward through
            the model twice; "auto" is 1 unless what it keeps would not fit in device memory.
        nonfinite: what a sample does whose gradient norm is not finite (NaN, infinity, overflow). "refuse": the step
            raises MemprofError, which depends on the data. "drop": the sample adds nothing to the sum, as if its
            gradient were zero; see DPOptimizerFlashClip.dropped_samples. On CUDA the host then waits for the norms.

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
        max_grad_norm: float | list[float] = 1.0,
        clipping: Clipping = "flat",
        workspace_mb: float = DEFAULT_WORKSPACE_MB,
        passes: Passes = "auto",
        nonfinite: Nonfinite = "refuse",
    ) -> None:
        if not batch_first:
            raise MemprofError("flash_clip needs batch_first=True: transpose the inputs so that the batch comes first.")
        if loss_reduction not in ("mean", "sum"):
            raise MemprofError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'.")
        if passes not in ("auto", 1, 2):
            raise MemprofError(f"flash_clip_passes is {passes!r}; it must be 'auto', 1 or 2.")
        if nonfinite not in ("refuse", "drop"):
            raise MemprofError(f"flash_clip_nonfinite is {nonfinite!r}; it must be 'refuse' or 'drop'.")
        rule = ClipRule(clipping, max_grad_norm)
        if passes == 2 and rule.by_parameter:
            raise MemprofError("flash_clip_passes=2 finds one clip factor for all parameters; use 1 with 'per_layer'.")
        bookkeeping = Bookkeeping(rule, loss_reduction, Workspace.from_mib(workspace_mb), nonfinite)
        units = Units(inner_model(m))
        if units.is_sharded and passes == 2:
            raise MemprofError("flash_clip_passes=2 runs backward twice, which FSDP2 does not expect; use 1.")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.bookkeeping = bookkeeping
        self.passes: Passes = 1 if rule.by_parameter or units.is_sharded else passes
        self._shared_samples = SharedSamples(units.model) if units.is_sharded else None
        self.units = units
        self.layer_hooks = LayerHooks(bookkeeping)
        self.hooks_enabled = True
        self._hooked: set[nn.Module] = set()
        self._cannot_run: BaseException | None = None
        self._layouts: dict[Any, tuple[dict[Layer, Layout], dict[nn.Module, PlainLayer]]] = {}
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
        return {p: name for name, p in self.units.model.named_parameters() if p.requires_grad}

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
        self._hooked.clear()
        self.bookkeeping.clear()
        let_reducer_run(self._module, True)

    def _attach(self) -> None:
        """Puts hooks on the model, and on the modules of layers that have none yet."""
        handles = self.autograd_grad_sample_hooks
        for module in (self.units.model, *self.units.at):
            if module in self._hooked:
                continue
            self._hooked.add(module)
            is_model = module is self.units.model
            before, after = (
                (self._before_model, self._after_model) if is_model else (self._before_module, self._after_module)
            )
            handles.append(module.register_forward_pre_hook(_untraced(before), with_kwargs=True))
            # Before FSDP's hook: in backward, FSDP then gathers the parameters before the tap keeps anything, and its
            # buffer has gone by then. An embedding needs no parameters there.
            first = isinstance(module, FSDPModule) and not is_model and not isinstance(module, nn.Embedding)
            handles.append(
                module.register_forward_hook(_untraced(after), with_kwargs=True, always_call=True, prepend=first)
            )

    def _active(self) -> bool:
        hooks, model = self.layer_hooks, self.units.model
        if not self.hooks_enabled or not model.training or is_repeating() or self._cannot_run is not None:
            return False
        return hooks.observe is not None if hooks.is_probing else True

    # --- a layer ---
    def _before_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._active():
            return None
        plain = self.layer_hooks.plain.get(module)
        if plain is not None and plain.before(args):
            return None
        changed = None
        for layer in self.units.at.get(module, ()):
            changed = self.layer_hooks.before(layer, args, kwargs) or changed
        return changed

    def _after_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Also called if forward raises (then output is None), so that parameters always become trainable again.
        plain = self.layer_hooks.plain.get(module)
        if plain is not None and plain.is_running:
            return plain.after(args, kwargs, output)
        result = None
        for layer in self.units.at.get(module, ()):
            changed = self.layer_hooks.after(layer, args, kwargs, output)
            if changed is not None:
                result = output = changed
        return result

    # --- the model ---
    def _run_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward, between the hooks of the model as a layer."""
        args, kwargs = self._before_module(self.units.model, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = self.units.model.forward(*args, **kwargs)
        finally:
            changed = self._after_module(self.units.model, args, kwargs, output)
        return output if changed is None else changed

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._active():
            return None
        if torch.is_grad_enabled() and not self.bookkeeping.is_captured:
            refuse_capture()
        self.layer_hooks.batch = _batch_size(args, kwargs)
        self._probe(args, kwargs)
        if self._cannot_run is not None:
            return None
        if torch.is_grad_enabled():
            self.layer_hooks.for_compiled_autograd = is_compiled_autograd_enabled()
            self.bookkeeping.begin_pass()
            self.layer_hooks.kept_bytes = 0
            if self.passes == "auto" and torch.cuda.is_available():
                self._allocated_before = _allocated_bytes()
        return self._before_module(module, args, kwargs)

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds out where the layers have the samples, once for each kind of inputs."""
        leaves, structure = tree_flatten((args, kwargs))
        signature = (str(structure), tuple(leaf.dim() if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves))
        is_known, batch = signature in self._layouts, self.layer_hooks.batch
        if self._shared_samples is not None:
            shared = self._shared_samples.take(args, kwargs, batch, signature, is_known)
            if shared is not None:
                args, kwargs, self.layer_hooks.batch = shared
        if not is_known and self.layer_hooks.batch:
            refuse_context_parallel()
            for layer in self.units.at.get(self.units.model, ()):
                if not isinstance(layer, GenericLayer):
                    layer.check_input(first_input(layer, args, kwargs)[1])
            probe = Probe(
                self.units.model, self.units, self.layer_hooks, args, kwargs, self._run_model, self._units_changed
            )
            self.layer_hooks.plain = {}
            try:
                with _eager():
                    layouts = probe.layouts()
                self._layouts[signature] = layouts, plain_layers(self.units.at, layouts, self.layer_hooks)
            except CannotRunError as error:  # raised after the forward, which may fail for the same reason
                self._cannot_run = error.__cause__
                return
            finally:
                self.layer_hooks.batch = batch
        if signature in self._layouts:
            self.layer_hooks.layouts, self.layer_hooks.plain = self._layouts[signature]

    def _units_changed(self) -> None:
        self._layouts.clear()
        self.layer_hooks.plain = {}
        self._attach()

    def _after_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        changed = self._after_module(module, args, kwargs, output)
        output = output if changed is None else changed
        cause, self._cannot_run = self._cannot_run, None
        if output is not None and cause is not None:
            raise MemprofError(
                "flash_clip needs inputs whose first dimension is the batch, of the same length in all of them: this "
                f"model ran on its whole input, but not on some samples of it ({type(cause).__name__}: {cause})."
            ) from cause
        if output is None or not self._active() or not torch.is_grad_enabled() or self.passes == 1:
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
            self.layer_hooks.anchor(inner[0].device), inner, functools.partial(run_two_passes, self.bookkeeping)
        )
        for i, leaf in zip(indices, outer, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, structure)

    def _one_pass_fits(self) -> bool:
        """Whether what one pass keeps fits into device memory. Backward releases what forward has allocated, so only
        the bytes beyond that must be free."""
        kept_bytes = self.layer_hooks.kept_bytes
        if kept_bytes == 0:
            return True
        allocated = _allocated_bytes()
        growth = kept_bytes - (allocated - self._allocated_before)
        if growth <= 0:
            return True
        free, _ = torch.cuda.mem_get_info()
        return growth <= free + torch.cuda.memory_reserved() - allocated


def _allocated_bytes() -> int:
    """As torch.cuda.memory_allocated, in a fifth of the time: that sorts all statistics."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0


def _eager() -> AbstractContextManager[Any]:
    """Nothing is compiled, for a probe's few samples, in this context."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _untraced(hook: Any) -> Any:
    """A bound method that torch.compile, where a program uses it, calls as it is. What hooks do is not a part of the
    model's graph, and from them a tracer reaches the model that it is tracing."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return hook
    function = torch.compiler.disable(hook.__func__)  # type: ignore[no-untyped-call]
    return MethodType(function, hook.__self__)


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The length of the first tensor among the model's inputs."""
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise MemprofError("flash_clip needs a tensor among the model's inputs whose first dimension is the batch.")


class GradSampleModuleFlashClip(FlashClipHooks, AbstractGradSampleModule):  # type: ignore[misc]
    """The hooks of flash_clip in a module that wraps the model. See FlashClipHooks for the arguments."""

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        FlashClipHooks.__init__(self, m, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
