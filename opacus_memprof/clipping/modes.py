# SPDX-License-Identifier: Apache-2.0
"""Improves Opacus' own modes, and chooses between them and flash_clip.

Exact norm samplers make ghost clipping form no T x T matrix, and per-sample gradients need no copy.

grad_sample_mode="auto" picks the mode for a model and its batch, and logs the reason in one line. flash_clip is
preferred. For each layer it keeps at most the per-sample gradients, so it needs no more memory than hooks. It runs
backward once, so it is faster than ghost. If flash_clip refuses the model, large per-sample gradients select ghost,
with these norm samplers; otherwise hooks is used. The choice depends on parameter shapes and the batch size alone; the
model is not run.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import opacus.grad_sample
import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    grad_sample_module,
    grad_sample_module_fast_gradient_clipping,
)
from torch import nn

from opacus_memprof.clipping.agreement import spans_ranks
from opacus_memprof.clipping.cost import DEFAULT_WORKSPACE_MB
from opacus_memprof.clipping.layers import LAYERS
from opacus_memprof.clipping.layers.recognition import recognize
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

NormSampler = Callable[[nn.Module, list[torch.Tensor], torch.Tensor], dict[nn.Parameter, torch.Tensor]]
AUTO = "auto"
LARGE_BYTES = 256 * 2**20
"""Per-sample gradients with more bytes than this cost more than ghost's second backward pass."""

_LOGGER = logging.getLogger("opacus_memprof.clipping")


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


_LOGGER.setLevel(logging.INFO)  # Opacus leaves the root logger at WARNING


def make_private_automatically(
    make_private: Callable[[dict[str, Any]], Any], options: Mapping[str, Any], workspace_mb: float
) -> tuple[Any, ...]:
    """Makes a model private in the mode that fits it best.

    Args:
        make_private: the method of an engine that supports flash_clip; called with keyword arguments.
        options: the arguments of `make_private`. Ghost is considered only if they contain a "criterion".
        workspace_mb: upper limit on the temporaries of one layer, in MiB.

    Returns:
        (module, optimizer, data loader); with a criterion among the options, always (module, optimizer, criterion, data
        loader).

    Raises:
        MemprofError: flash_clip refuses the model on several ranks, or the workspace is not positive.
    """
    Workspace.from_mib(workspace_mb)
    kept = _sample_gradients(options["module"], options["data_loader"])
    try:
        prepared = make_private({**options, "grad_sample_mode": "flash_clip"})
    except MemprofError as refusal:
        if spans_ranks(options["module"]):  # maybe only some ranks refused; hooks would misread shards
            raise
        mode, why = _second_choice(options, kept)
        _LOGGER.warning(
            "grad_sample_mode='auto' is %s here: %s; flash_clip does not support the model: %s", mode, why, refusal
        )
        if mode == "ghost":
            register_norm_samplers(workspace_mb, options["module"])
        prepared = make_private({**options, "grad_sample_mode": mode})
    else:
        _LOGGER.info(
            "grad_sample_mode='auto' is flash_clip here: hooks would keep %s of per-sample gradients, of which "
            "flash_clip keeps each layer's or less; ghost would run backward twice",
            _mib(kept),
        )
    if "criterion" in options and len(prepared) == 3:
        prepared = (*prepared[:2], options["criterion"], prepared[2])
    return tuple(prepared)


def _second_choice(options: Mapping[str, Any], kept: int) -> tuple[str, str]:
    """Returns the mode for a model that flash_clip refuses, and the reason for the choice."""
    if kept <= LARGE_BYTES:
        return "hooks", f"its per-sample gradients take only {_mib(kept)}"
    if "criterion" not in options:
        return "hooks", f"its per-sample gradients take {_mib(kept)}, and ghost, which keeps none, needs a criterion"
    if options.get("clipping", "flat") != "flat" or not options.get("batch_first", True):
        return "hooks", f"its per-sample gradients take {_mib(kept)}, but ghost clips flat, with the batch first"
    return "ghost", f"hooks would keep {_mib(kept)} of per-sample gradients"


def _sample_gradients(module: Any, loader: Any) -> int:
    """Returns the size of a batch's per-sample gradients, in bytes."""
    samples = loader.batch_size or -(-len(loader.dataset) // len(loader))
    return int(samples * sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
