# SPDX-License-Identifier: Apache-2.0
"""Layers that normalize or scale features, whose per-sample gradients are small and always kept.

They are nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, and any layer whose output is `c(x) * weight + bias`, feature by
feature. On CUDA one kernel finds them where it can. Otherwise the normalized input is recomputed, some samples (or
tokens, or groups) at a time.
"""

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from opacus_memprof.clipping import cost
from opacus_memprof.clipping.forwards.repetition import repeating
from opacus_memprof.clipping.kernels.native import layer_norm_gradients_cpu
from opacus_memprof.clipping.kernels.norms import has_kernels, is_small
from opacus_memprof.clipping.layers.base import KeepFunction, KeptTensors, Layer, keep_stacks
from opacus_memprof.clipping.workspace import CPU_DTYPES, Workspace, accumulation_dtype, slices

_FLOAT32_EPS = torch.finfo(torch.float32).eps  # torch.rms_norm's default, in low precision too


class _LastDimensionsNorm(Layer):
    """A layer that normalizes over the last dimensions, each token separately."""

    module: nn.LayerNorm | nn.RMSNorm
    any_arrangement = True
    has_mean: bool
    """Whether the mean over the features is subtracted."""

    def min_dimensions(self) -> int:
        return 1 + len(self.module.normalized_shape)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        shape = self.module.normalized_shape
        dtype = accumulation_dtype(g.dtype)
        tokens = g.shape[1 : g.dim() - len(shape)].numel()
        gradients: dict[str, torch.Tensor] = {}
        if x is not None and self.is_trainable("weight") and self._has_kernel(x, g, workspace):
            flat = [each.view(len(g), tokens, -1) for each in (x, g)]
            weight, bias = self._gradients_cuda(*flat)
            own = {"bias": bias, "weight": weight}
            return {
                name: each.view(len(each), *shape)
                for name, each in own.items()
                if each is not None and self.is_trainable(name)
            }
        g = g.reshape(g.shape[0], tokens, *shape)
        if self.is_trainable("bias"):
            gradients["bias"] = g.sum(1, dtype=dtype) if tokens != 1 else g.squeeze(1)
        if x is None or not self.is_trainable("weight"):
            return gradients
        x = x.reshape(x.shape[0], tokens, *shape)
        token_bytes = cost.norm_bytes(torch.Size(shape).numel(), g.element_size())
        if g.shape[0] * tokens * token_bytes <= workspace.bytes:
            gradients["weight"] = self._weight_gradients(x.to(g.dtype), g)
            return gradients
        total = gradients["weight"] = torch.zeros(len(g), *shape, dtype=dtype, device=g.device)
        for n, t in workspace.tiles(len(g), tokens, token_bytes, f"one token of {self.describe()}"):
            product = self.normalize(x[n, t].to(g.dtype)).mul_(g[n, t])
            total[n] += product.sum(1, dtype=dtype)
            del product
        return gradients

    def keep_function(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, workspace: Workspace
    ) -> KeepFunction | None:
        is_flat = len(self.module.normalized_shape) == 1
        is_plain = is_flat and x.dim() == g.dim() == 3 and x.dtype == g.dtype and g.shape[1] > 1
        if is_plain and self.is_trainable("weight") and self._has_kernel(x, g, workspace):
            return self._keep_stacks_cuda
        fits = cost.norm_bytes(g.numel(), g.element_size()) <= workspace.bytes
        return self._keep_stacks if is_plain and fits and self.is_trainable("weight") else None

    def _keep_stacks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Keeps the per-sample gradients, for inputs [B, T, features]."""
        bias = self.module._parameters.get("bias")
        stacks: dict[nn.Parameter, torch.Tensor] = {}
        if bias is not None and bias.requires_grad:
            stacks[bias] = g.sum(1, dtype=accumulation_dtype(g.dtype))
        stacks[self.weight()] = self._weight_gradients(x, g)
        return keep_stacks(stacks)

    def _keep_stacks_cuda(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Does the same as `_keep_stacks`, by one kernel."""
        weight, bias = self._gradients_cuda(x, g)
        own = [(self.module._parameters.get("bias"), bias), (self.module._parameters["weight"], weight)]
        stacks = {p: stack for p, stack in own if p is not None and p.requires_grad and stack is not None}
        return keep_stacks(stacks)

    def _has_kernel(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> bool:
        """Returns whether one kernel computes the gradients, with temporaries that fit."""
        if not (has_kernels(x) and has_kernels(g) and x.is_contiguous() and g.is_contiguous() and g.numel()):
            return False
        features = math.prod(self.module.normalized_shape)
        samples = len(g)
        tokens = g.numel() // (samples * features)
        needed = cost.token_norm_bytes(samples, tokens, features, has_mean=self.has_mean)
        return x.shape == g.shape and needed is not None and needed <= workspace.bytes

    def _gradients_cuda(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the per-sample gradients of the weight and the bias, for inputs [B, T, features]."""
        from opacus_memprof.clipping.kernels.stacks import token_norm_gradients_cuda

        eps = self.module.eps
        return token_norm_gradients_cuda(x, g, _FLOAT32_EPS if eps is None else eps, has_mean=self.has_mean)

    def _weight_gradients(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Returns the weight's per-sample gradients, all at once, for inputs [B, T, *normalized_shape].

        They are allocated before the temporaries; the out-of-memory advice relies on this order.
        """
        dtype = accumulation_dtype(g.dtype)
        total = torch.empty(g.shape[0], *g.shape[2:], dtype=dtype, device=g.device)
        return torch.sum(self.normalize(x).mul_(g), 1, dtype=dtype, out=total)


class LayerNormLayer(_LastDimensionsNorm):
    """nn.LayerNorm."""

    module: nn.LayerNorm
    has_mean = True

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        if x is None or not self.is_trainable("weight") or not self._accumulates_in_float64(g):
            return super().small_gradients(x, g, workspace)
        g = g.reshape(len(g), g.shape[1:-1].numel(), g.shape[-1])
        x = x.reshape(g.shape).to(g.dtype)
        stacks = [torch.empty(len(g), g.shape[-1], dtype=g.dtype) for _ in range(2)]
        for n in slices(len(g), max(1, workspace.fit(2 * g[:1].nbytes, len(g)))):
            parts = layer_norm_gradients_cpu(x[n].contiguous(), g[n].contiguous(), self.module.eps)
            for stack, part in zip(stacks, parts, strict=True):
                stack[n] = part
        return {name: s for name, s in zip(("bias", "weight"), stacks[::-1], strict=True) if self.is_trainable(name)}

    def _accumulates_in_float64(self, g: torch.Tensor) -> bool:
        """Returns whether gradients are found by one call into C++, whatever the number of samples.

        In float32, a sum over tokens that cancel would differ from that of a smaller batch.
        """
        return len(self.module.normalized_shape) == 1 and not has_kernels(g) and g.is_cpu and g.dtype in CPU_DTYPES

    def keep_function(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, workspace: Workspace
    ) -> KeepFunction | None:
        own = super().keep_function(kept, x, g, workspace)
        if own is None or not self._accumulates_in_float64(g):
            return own
        return self._keep_stacks_cpu if is_small(x) and is_small(g) else None

    def _keep_stacks_cpu(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Does the same as `_keep_stacks`, for small tensors, in one call into C++."""
        weight, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        of_weight, of_bias = layer_norm_gradients_cpu(x, g, self.module.eps)
        own = [(bias, of_bias), (weight, of_weight)]
        stacks = {parameter: stack for parameter, stack in own if parameter is not None and parameter.requires_grad}
        return keep_stacks(stacks)


class RMSNormLayer(_LastDimensionsNorm):
    """nn.RMSNorm."""

    module: nn.RMSNorm
    has_mean = False

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, list(self.module.normalized_shape), eps=self.module.eps)


class GroupNormLayer(Layer):
    """nn.GroupNorm."""

    module: nn.GroupNorm

    def min_dimensions(self) -> int:
        return 2

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        dtype = accumulation_dtype(g.dtype)
        channels, groups = self.module.num_channels, self.module.num_groups
        if x is not None and self.is_trainable("weight") and self._has_kernel(x, g):
            from opacus_memprof.clipping.kernels.stacks import group_norm_gradients_cuda

            weight, bias = group_norm_gradients_cuda(x, g, groups, self.module.eps)
            return {"weight": weight, **({"bias": bias} if self.is_trainable("bias") else {})}
        g = g.reshape(len(g), channels, g.shape[2:].numel())
        gradients: dict[str, torch.Tensor] = {}
        if self.is_trainable("bias"):
            gradients["bias"] = g.sum(2, dtype=dtype)
        if x is None or not self.is_trainable("weight"):
            return gradients
        x = x.reshape(g.shape)
        group_bytes = cost.norm_bytes(channels // groups * g.shape[2], g.element_size())
        if g.shape[0] * groups * group_bytes <= workspace.bytes:
            total = gradients["weight"] = torch.empty(g.shape[:2], dtype=dtype, device=g.device)
            product = torch.group_norm(x.to(g.dtype), groups, eps=self.module.eps).mul_(g)
            torch.sum(product, 2, dtype=dtype, out=total)
            return gradients
        total = gradients["weight"] = torch.zeros(g.shape[:2], dtype=dtype, device=g.device)
        for n, k in workspace.tiles(g.shape[0], groups, group_bytes, f"one group of {self.describe()}"):
            c = slice(k.start * channels // groups, k.stop * channels // groups)
            product = torch.group_norm(x[n, c].to(g.dtype), k.stop - k.start, eps=self.module.eps).mul_(g[n, c])
            total[n, c] = product.sum(2, dtype=dtype)
            del product
        return gradients

    def keep_function(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, workspace: Workspace
    ) -> KeepFunction | None:
        waits = all(norms is None for norms in kept.norms.values())
        return self._keep_stacks if waits and self.is_trainable("weight") and self._has_kernel(x, g) else None

    def _keep_stacks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Keeps the per-sample gradients, which one kernel computes, and defers all norms."""
        from opacus_memprof.clipping.kernels.stacks import group_norm_gradients_cuda

        gradients = group_norm_gradients_cuda(x, g, self.module.num_groups, self.module.eps)
        own = zip(self.module._parameters.values(), gradients, strict=True)
        stacks = {parameter: stack for parameter, stack in own if parameter is not None and parameter.requires_grad}
        return keep_stacks(stacks)

    def _has_kernel(self, x: torch.Tensor, g: torch.Tensor) -> bool:
        """Returns whether one kernel computes the gradients, and is not slower than torch's kernels.

        It has a program for each group.
        """
        if not (has_kernels(x) and has_kernels(g) and x.is_contiguous() and g.is_contiguous()):
            return False
        return cost.has_group_norm_kernel(x[:1].numel(), self.module.num_groups)


_COPIES = 6  # copies of the input that are live: casts, squares, the normalized input and its product


class ScaleLayer(Layer):
    """A layer whose output is `c(x) * weight + bias`, feature by feature.

    `c(x)` is its own output for a weight of ones and no bias. If a layer adds one to the weight, `c(x)` is the output
    for a weight of zeros.

    Args:
        name: the name of the module.
        module: the module; its parameters are `weight` and perhaps `bias`, both with one element for each feature.
        axis: the dimension of the features: -1 or 1.
        unit: the value of the weight at which the output is c(x): 1, or 0.
    """

    def __init__(self, name: str, module: nn.Module, axis: Literal[-1, 1], unit: float) -> None:
        super().__init__(name, module)
        self.axis, self.unit = axis, unit
        self.any_arrangement = axis == -1

    def min_dimensions(self) -> int:
        return 2

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        dtype = accumulation_dtype(g.dtype)
        gradients: dict[str, torch.Tensor] = {}
        if self.is_trainable("bias"):
            gradients["bias"] = self._sum(g, dtype)
        if x is None or not self.is_trainable("weight"):
            return gradients
        total = gradients["weight"] = torch.zeros(len(g), self.weight().numel(), dtype=dtype, device=g.device)
        sample_bytes = _COPIES * g[:1].numel() * dtype.itemsize
        for n in slices(len(g), max(1, workspace.fit(sample_bytes, len(g)))):
            total[n] = self._sum(self.normalize(x[n]).to(g.dtype) * g[n], dtype)
        return gradients

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Returns c(x)."""
        own = self.module.named_parameters()
        values = {name: torch.zeros(p.shape, dtype=p.dtype, device=x.device) for name, p in own}
        values["weight"].fill_(self.unit)
        with torch.no_grad(), repeating():
            output: Any = functional_call(self.module, values, (x,))
        result: torch.Tensor = output
        return result

    def _sum(self, g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sums over all dimensions except samples and features."""
        features = g.dim() - 1 if self.axis == -1 else 1
        others = tuple(i for i in range(1, g.dim()) if i != features)
        return g.sum(others, dtype=dtype) if others else g.to(dtype)
