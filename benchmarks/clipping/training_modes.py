# SPDX-License-Identifier: Apache-2.0
"""Runs one training step in every mode that the clipping benchmarks compare.

The modes are training without privacy, Opacus' modes, flash_clip, and other libraries if they can be imported.

FlashNorm is a fork of Opacus: its modes need a process that imports the fork as ``opacus``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

OPACUS = ["hooks", "functorch", "ghost", "flash_clip"]
FASTDP = {"fastDP MixOpt": "MixOpt", "fastDP ghost": "ghost"}  # mode → fastDP's clipping_mode
FLASHNORM = {f"FlashNorm {mode}": mode for mode in ("flash", "flash_bk", "flash_fuse_bk")}  # → its grad_sample_mode
GRAPHED = {f"{mode} graph": mode for mode in ("vanilla", "flash_clip")}  # forward and backward as a CUDA graph → mode
SHARDED = ["ghost_fsdp", "flash_clip"]  # of a model that FSDP2 shards

Step = Callable[[torch.Tensor, torch.Tensor], None]


def adapt(mode: str, model: nn.Module) -> nn.Module:
    """Returns the model with the layers that a mode needs, before an optimizer has its parameters.

    FlashNorm's fused modes have linear layers of their own.
    """
    if "fuse" not in FLASHNORM.get(mode, ""):
        return model
    from opacus.grad_sample.fused_flash_linear import replace_linear_with_fused

    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    adapted: nn.Module = replace_linear_with_fused(model)
    for name, p in adapted.named_parameters():
        p.requires_grad_(trained[name])
    return adapted


def prepare(
    mode: str,
    model: nn.Module,
    optimizer: Any,
    batch: int,
    *,
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 1.0,
) -> tuple[Step, Callable[[], None]]:
    """Makes a training private.

    Args:
        mode: "vanilla", or of the lists above.
        model: without or with FSDP2's shards.
        optimizer: of the model's parameters.
        batch: samples of all processes together.
        noise_multiplier: as in Opacus.
        max_grad_norm: as in Opacus.

    Returns:
        A step, a function of inputs and targets with the samples first, and a function that undoes all.
    """
    if mode == "vanilla":
        return _step(model, optimizer, functional.cross_entropy), lambda: None
    if mode == "vanilla graph":
        return _graphed_step(model, optimizer), lambda: None
    if mode in FASTDP:
        return _fastdp(FASTDP[mode], model, optimizer, batch, noise_multiplier, max_grad_norm)
    grad_sample_mode = FLASHNORM.get(mode, GRAPHED.get(mode, mode))
    has_criterion = grad_sample_mode not in OPACUS or mode == "ghost"
    loader = DataLoader(TensorDataset(torch.zeros(8 * batch, 1)), batch_size=batch)
    private = _engine(grad_sample_mode).make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        poisson_sampling=False,
        grad_sample_mode=grad_sample_mode,
        **({"criterion": nn.CrossEntropyLoss()} if has_criterion else {}),
    )
    module, optimizer = private[0], private[1]
    if mode in GRAPHED:
        return _graphed_private_step(module, optimizer), module.to_standard_module
    loss = private[2] if has_criterion else functional.cross_entropy
    return _step(module, optimizer, loss, tells_shape=has_criterion), module.to_standard_module


def _engine(mode: str) -> Any:
    import opacus

    if mode != "flash_clip":
        return opacus.PrivacyEngine(accountant="rdp")
    from opacus_memprof.clipping import FlashClipEngineMixin

    return type("Engine", (FlashClipEngineMixin, opacus.PrivacyEngine), {})(accountant="rdp")


def _fastdp(
    clipping_mode: str, model: nn.Module, optimizer: Any, batch: int, noise_multiplier: float, max_grad_norm: float
) -> tuple[Step, Callable[[], None]]:
    from fastDP import PrivacyEngine

    engine = PrivacyEngine(
        model,
        batch_size=batch,
        sample_size=8 * batch,
        epochs=1,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        clipping_fn="Abadi",
        clipping_mode=clipping_mode,
    )
    engine.attach(optimizer)
    return _step(model, optimizer, functional.cross_entropy), engine.detach


def _step(module: Any, optimizer: Any, loss: Any, tells_shape: bool = False) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        logits = module(x)
        # Opacus' two backward passes must know which tokens are of one sample.
        shape = {"shape": logits.shape} if tells_shape and logits.dim() == 3 else {}
        value = loss(logits.flatten(0, -2), y.flatten(), **shape)
        del logits
        value.backward()
        optimizer.step()

    return step


def _loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(x).flatten(0, -2), y.flatten())


def _graphed_step(model: nn.Module, optimizer: Any) -> Step:
    """Without privacy, as torch's documentation graphs forward and backward. The first step's shapes are all steps'."""
    graph = torch.cuda.CUDAGraph()
    inputs: list[torch.Tensor] = []

    def capture(*batch: torch.Tensor) -> None:
        inputs.extend(each.clone() for each in batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.zero_grad()
                _loss(model, *inputs).backward()
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            _loss(model, *inputs).backward()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        if not inputs:
            capture(x, y)
        for own, given in zip(inputs, (x, y), strict=True):
            own.copy_(given)
        graph.replay()
        optimizer.step()

    return step


def _graphed_private_step(module: Any, optimizer: Any) -> Step:
    from opacus_memprof.clipping import GraphedBackward

    graphed: list[GraphedBackward] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        if not graphed:
            graphed.append(GraphedBackward(module, optimizer, lambda *batch: _loss(module, *batch), (x, y)))
        optimizer.zero_grad()
        graphed[0](x, y)
        optimizer.step()

    return step
