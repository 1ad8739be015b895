# SPDX-License-Identifier: Apache-2.0
"""Improves Opacus' own modes: exact norm samplers for ghost clipping, and per-sample gradients without a copy."""

from collections.abc import Callable
from typing import Any

import opacus.grad_sample
import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    grad_sample_module,
    grad_sample_module_fast_gradient_clipping,
)
from torch import nn

from opacus_memprof.clipping.cost import DEFAULT_WORKSPACE_MB
from opacus_memprof.clipping.layers import LAYERS
from opacus_memprof.clipping.layers.recognition import recognize
from opacus_memprof.clipping.workspace import Workspace

NormSampler = Callable[[nn.Module, list[torch.Tensor], torch.Tensor], dict[nn.Parameter, torch.Tensor]]


class FlashNormSampler:
    """A norm sampler in Opacus' form: `(layer, activations, backprops) -> {parameter: norms of shape [B]}`."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __call__(
        self, layer: nn.Module, activations: list[torch.Tensor], backprops: torch.Tensor
    ) -> dict[nn.Parameter, torch.Tensor]:
        kind = type(layer)
        made = LAYERS[kind]("", layer) if kind in LAYERS else recognize("", layer)
        assert made is not None  # only layers of recognized types have this sampler
        norms = made.keep_norms(activations[0], backprops, self.workspace).norms
        return {parameter: squares.sqrt_() for parameter, squares in norms.items() if squares is not None}


def register_norm_samplers(
    workspace_mb: float = DEFAULT_WORKSPACE_MB, model: nn.Module | None = None
) -> Callable[[], None]:
    """Registers exact norm samplers for every layer type that flash_clip supports, for Opacus' ghost clipping.

    `opacus.PrivacyEngine().make_private(..., grad_sample_mode="ghost")` then never forms a T x T matrix. It still runs
    two backward passes. Models made private before are affected too: Opacus looks samplers up when it calls them.

    Args:
        workspace_mb: ceiling, in MiB, on the temporaries of one layer's norm.
        model: a model whose layers of other types get samplers too, where flash_clip recognizes what they compute, such
            as Conv1D and RMSNorm of transformers.

    Returns:
        A function that restores the samplers that were registered before.

    Raises:
        MemprofError: `workspace_mb` is not positive.
    """
    samplers: dict[type[nn.Module], NormSampler] = GradSampleHooksFastGradientClipping.NORM_SAMPLERS
    sampler = FlashNormSampler(Workspace.from_mib(workspace_mb))
    types = [*LAYERS, *_recognized_types(model)]
    originals = {cls: samplers.get(cls) for cls in types}
    samplers.update(dict.fromkeys(types, sampler))

    def restore() -> None:
        for cls, original in originals.items():
            if original is None:
                samplers.pop(cls, None)
            else:
                samplers[cls] = original

    return restore


def _recognized_types(model: nn.Module | None) -> list[type[nn.Module]]:
    """Returns the types whose trained layers in the model are all recognized."""
    recognized: dict[type[nn.Module], bool] = {}
    for name, module in model.named_modules() if model is not None else ():
        if type(module) not in LAYERS and any(p.requires_grad for p in module.parameters(recurse=False)):
            known = recognized.get(type(module), True)
            recognized[type(module)] = known and recognize(name, module) is not None
    return [kind for kind, known in recognized.items() if known]


_NAME = "create_or_accumulate_grad_sample"
_IMPORTED_BY: tuple[Any, ...] = (
    grad_sample_module,
    grad_sample_module_fast_gradient_clipping,
    opacus.grad_sample,
)


_adopted = 0  # calls of adopt_grad_samples in effect


def adopts_grad_samples() -> bool:
    """Returns whether `adopt_grad_samples` is in effect."""
    return _adopted > 0


def has_norm_samplers() -> bool:
    """Returns whether `register_norm_samplers` is in effect."""
    return isinstance(GradSampleHooksFastGradientClipping.NORM_SAMPLERS.get(nn.Linear), FlashNormSampler)


def adopt_grad_samples() -> Callable[[], None]:
    """Makes Opacus use the tensors that a grad sampler returns as `p.grad_sample`, without a copy.

    Opacus copies the result into zeros of the same size, so that backward holds the per-sample gradients of a layer
    twice. The copy is kept where it is needed: for padded batches (packed sequences) and for parameters that are used
    more than once in a forward pass. The gradients have the same values. Models made private before are affected as
    well: Opacus looks the function up when it calls it.

    Returns:
        A function that restores the previous state.
    """
    global _adopted
    copy = vars(grad_sample_module)[_NAME]

    def create_or_accumulate_grad_sample(*, param: Any, grad_sample: torch.Tensor, max_batch_len: int) -> None:
        complete = len(grad_sample) == max_batch_len and grad_sample.is_contiguous()
        is_only_use = getattr(param, "_forward_counter", 0) == 1 and not hasattr(param, "_current_grad_sample")
        if param.requires_grad and complete and is_only_use:
            param._current_grad_sample = grad_sample
        else:
            copy(param=param, grad_sample=grad_sample, max_batch_len=max_batch_len)

    for module in _IMPORTED_BY:
        setattr(module, _NAME, create_or_accumulate_grad_sample)
    _adopted += 1

    def restore() -> None:
        global _adopted
        _adopted -= 1
        for module in _IMPORTED_BY:
            setattr(module, _NAME, copy)

    return restore
