# SPDX-License-Identifier: Apache-2.0
"""Finds the layers that flash_clip clips, and refuses models that it cannot clip exactly."""

from __future__ import annotations

from torch import nn

from opacus_memprof.clipping.layers import LAYERS, Layer
from opacus_memprof.errors import MemprofError


def find_layers(model: nn.Module) -> list[Layer]:
    """The trainable layers of ``model``, in order.

    Raises:
        MemprofError: nothing is trainable; a trainable parameter belongs to a layer of an unsupported type, or to two
            layers; an embedding has options under which per-sample gradients do not exist.
    """
    layers: list[Layer] = []
    unsupported: list[str] = []
    owners: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        trainable = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not trainable:
            continue
        if type(module) not in LAYERS or not trainable.keys() <= {"weight", "bias"}:
            unsupported.append(f"{name or '(the model itself)'} ({type(module).__name__}: {', '.join(trainable)})")
            continue
        _refuse_shared(model, module, name, trainable, owners)
        layers.append(LAYERS[type(module)](name, module))
        if isinstance(module, nn.Embedding):
            _refuse_embedding_options(module, name)
    if unsupported:
        raise MemprofError(
            f"flash_clip cannot clip the trainable parameters of {'; '.join(unsupported)}. Freeze them with "
            f"requires_grad_(False), replace these layers by {', '.join(kind.__name__ for kind in LAYERS)}, or use "
            "grad_sample_mode='hooks'."
        )
    if not layers:
        raise MemprofError("flash_clip found no trainable parameter: every parameter has requires_grad=False.")
    return layers


def _refuse_shared(
    model: nn.Module,
    module: nn.Module,
    name: str,
    trainable: dict[str, nn.Parameter],
    owners: dict[nn.Parameter, str],
) -> None:
    names = [other for other, found in model.named_modules(remove_duplicate=False) if found is module]
    for local, parameter in trainable.items():
        full = f"{name}.{local}" if name else local
        other = owners.setdefault(parameter, full)
        if other == full and len(names) > 1:
            other = f"{names[1]}.{local}"
        if other != full:
            raise MemprofError(
                f"{other} and {full} are the same parameter (tied weights), which flash_clip cannot clip exactly: "
                "untie them (assign a clone to one), freeze them, or use grad_sample_mode='hooks'."
            )


def _refuse_embedding_options(module: nn.Embedding, name: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise MemprofError(
                f"layer {name!r} (Embedding) has {option}={getattr(module, option)}, under which the samples of a "
                f"batch have no exact gradients of their own; build it without {option}."
            )
