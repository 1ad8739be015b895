# SPDX-License-Identifier: Apache-2.0
"""The layers, shapes, types and modes that the oracle is asked about, and how to train one step of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias as SequenceBiasModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle import formulas as f
from tests.oracle.layer import Layer


@dataclass(frozen=True)
class Case:
    """One layer (or a few), on one batch, in one mode."""

    name: str
    layers: tuple[Layer, ...]  # in the order of model.parameters()
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    captured: tuple[tuple[int, bool], ...]  # storages born in forward: bytes, kept by autograd as well
    mode: str = "hooks"
    reduction: str = "mean"
    dtype: str = "float32"
    tokens: int = 0  # ids below this are the input, instead of floats
    frozen: tuple[str, ...] = ()  # names of parameters
    adam: bool = False

    @property
    def hooked(self) -> tuple[Layer, ...]:
        """The layers that Opacus hooks: those with something to train."""
        return tuple(layer for layer in self.layers if layer.trained)

    def captured_bytes(self, saved_by_autograd: bool) -> int:
        """Bytes that Opacus' activation hooks hold after forward, with or without autograd holding them as well."""
        captures = () if self.mode == "ew" else self.captured
        return sum(size for size, saved in captures if saved == saved_by_autograd)

    def __str__(self) -> str:
        return f"{self.name}-{self.mode}-{self.reduction}-{self.dtype}-b{self.layers[0].batch}"


class Fresh(nn.Module):
    """Runs a layer on a copy of the batch, so that what the layer captures was born in forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        out = self.layer(x, x, x, need_weights=False) if isinstance(self.layer, DPMultiheadAttention) else self.layer(x)
        return (out[0] if isinstance(out, tuple) else out).flatten(1)


class LowRank(nn.Module):
    """A frozen Linear and a trained pair of rank r beside it: LoRA's forward."""

    def __init__(self, d: int, p: int, r: int) -> None:
        super().__init__()
        self.base = nn.Linear(d, p)
        self.a = nn.Linear(d, r, bias=False)
        self.b = nn.Linear(r, p, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class SquaredError(nn.Module):
    """A loss for each sample, then reduced as told. Ghost clipping asks for reduction `none`."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = (outputs - targets).square().mean(dim=1)
        return {"none": losses, "mean": losses.mean(), "sum": losses.sum()}[self.reduction]


@dataclass
class Training:
    """What `make_private` returned, and the batch."""

    module: nn.Module
    optimizer: Any
    criterion: Any
    inputs: torch.Tensor
    targets: torch.Tensor

    def forward(self) -> Any:
        """Returns the loss."""
        return self.criterion(self.module(self.inputs), self.targets)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def hooked(self) -> list[nn.Module]:
        """Modules with parameters of their own to train, in the order of `case.hooked`.

        DPLSTM and DPGRU only rename their cells' parameters.
        """
        modules = (m for m in self.module.modules() if not isinstance(m, DPLSTM | DPGRU))
        return [m for m in modules if any(p.requires_grad for p in m.parameters(recurse=False))]


def prepare(case: Case, device: str = "cpu", engine: Any = None) -> Training:
    """Builds the case's model and makes it private, with a fixed seed."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model = Fresh(case.build()).to(device=device, dtype=dtype)
    for name, parameter in model.layer.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    if case.tokens:
        inputs = torch.arange(math.prod(case.input_shape), device=device).reshape(case.input_shape) % case.tokens
    else:
        inputs = torch.randn(case.input_shape, device=device, dtype=dtype)
    with torch.no_grad():
        targets = torch.zeros_like(copy.deepcopy(model)(inputs))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained) if case.adam else torch.optim.SGD(trained, lr=0.1)
    criterion = SquaredError(case.reduction)
    module, optimizer, *criteria, _ = (engine or PrivacyEngine()).make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(inputs), batch_size=len(inputs)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction=case.reduction,
        poisson_sampling=False,
        grad_sample_mode=case.mode,
    )
    return Training(module, optimizer, criteria[0] if criteria else criterion, inputs, targets)


def single(layer: Layer, module: Callable[[], nn.Module], shape: tuple[int, ...], name: str, **rest: Any) -> Case:
    captured = ((layer.captured, layer.saved_by_autograd),)
    return Case(name, (layer,), module, (layer.batch, *shape), captured, **rest)


def linear(batch: int, s: int) -> Iterator[Case]:
    for middle in ((), (5,), (3, 4)):
        for bias in (True, False):
            layer = f.Linear(batch, s, 12, 7, middle, bias=True if bias else None)
            name = f"linear{len(middle) + 2}d{'-bias' if bias else ''}"
            yield single(layer, partial(nn.Linear, 12, 7, bias=bias), (*middle, 12), name)


def linear_long(batch: int, s: int) -> Iterator[Case]:
    """A sequence so long that ghost's T x T matrices exceed the per-sample gradient."""
    yield single(f.Linear(batch, s, 6, 5, (24,)), partial(nn.Linear, 6, 5), (24, 6), "linear3d-long")


def partly_frozen(batch: int, s: int) -> Iterator[Case]:
    for middle in ((), (5,)):
        shape = (*middle, 12)
        bias_only = f.Linear(batch, s, 12, 24, middle, weight=False)
        yield single(bias_only, partial(nn.Linear, 12, 24), shape, f"bias-only{len(middle) + 2}d", frozen=("weight",))
        weight_only = f.Linear(batch, s, 12, 7, middle, bias=False)
        yield single(weight_only, partial(nn.Linear, 12, 7), shape, f"weight-only{len(middle) + 2}d", frozen=("bias",))


def low_rank(batch: int, s: int) -> Iterator[Case]:
    d, p, r, t = 16, 12, 4, 6
    base = f.Linear(batch, s, d, p, (t,), weight=False, bias=False)
    a = f.Linear(batch, s, d, r, (t,), bias=None)
    b = f.Linear(batch, s, r, p, (t,), bias=None)
    yield Case(
        "lora",
        (base, a, b),
        partial(LowRank, d, p, r),
        (batch, t, d),
        ((a.captured, True), (b.captured, True)),  # the frozen base has no hook
        frozen=("base.weight", "base.bias"),
    )


def embedding(batch: int, s: int) -> Iterator[Case]:
    yield single(f.Embedding(batch, s, 6, 20, 8), partial(nn.Embedding, 20, 8), (6,), "embedding", tokens=20)


def norms(batch: int, s: int) -> Iterator[Case]:
    for middle in ((), (5,), (3, 4)):
        shape = (*middle, 10)
        layer = f.Norm(batch, s, 10, middle)
        yield single(layer, partial(nn.LayerNorm, 10), shape, f"layer_norm{len(shape) + 1}d")
    yield single(f.GroupNorm(batch, s, 12, (4, 4), groups=3), partial(nn.GroupNorm, 3, 12), (12, 4, 4), "group_norm")


def rms_norm(batch: int, s: int) -> Iterator[Case]:
    yield single(f.Norm(batch, s, 24, (5,), bias=False), partial(nn.RMSNorm, 24), (5, 24), "rms_norm")


def conv(batch: int, s: int) -> Iterator[Case]:
    for name, o, kernel, size, options in (
        ("conv2d", 8, (3, 3), (8, 8), {}),
        ("conv2d-padded", 8, (3, 3), (8, 8), {"padding": 1}),
        ("conv2d-strided", 8, (3, 3), (8, 8), {"stride": 2, "padding": 1}),
        ("conv2d-groups", 8, (3, 3), (6, 6), {"groups": 4}),
        ("conv2d-dilated", 8, (3, 3), (8, 8), {"dilation": 2}),
        ("conv2d-1x1", 8, (1, 1), (5, 5), {"bias": False}),
        ("conv1d", 8, (3,), (12,), {"padding": 1}),
        ("conv1d-strided-groups", 8, (3,), (12,), {"stride": 2, "groups": 2, "bias": False}),
    ):
        layer = f.Conv(batch, s, 4, o, kernel, size, **options)
        module = nn.Conv2d if len(kernel) == 2 else nn.Conv1d
        yield single(layer, partial(module, 4, o, kernel, **options), (4, *size), name)


def recurrent(batch: int, s: int) -> Iterator[Case]:
    d, h, t = 6, 5, 4
    for name, cls, gates in (("lstm", DPLSTM, 4), ("gru", DPGRU, 3)):
        ih = f.RNNLinear(batch, s, d, gates * h, steps=t)
        hh = f.RNNLinear(batch, s, h, gates * h, steps=t)
        # ih captures the time steps of one input; hh the initial state and every hidden state but the last.
        captured = ((t * ih.captured, True), *((hh.captured, True),) * t)
        yield Case(name, (ih, hh), partial(cls, d, h, batch_first=True), (batch, t, d), captured)


def attention(batch: int, s: int) -> Iterator[Case]:
    e, t = 12, 5
    projection = f.Linear(batch, s, e, e, (t,))
    # q, k and v capture one input.
    captured = ((projection.captured, True),) * 2
    build = partial(DPMultiheadAttention, e, 3, batch_first=True)
    yield Case("attention", (projection,) * 4, build, (batch, t, e), captured)


def sequence_bias(batch: int, s: int) -> Iterator[Case]:
    build = partial(SequenceBiasModule, 24, batch_first=True)
    yield single(f.SequenceBias(batch, s, 5, 24), build, (5, 24), "sequence_bias")


LAYERS = (linear, low_rank, embedding, norms, conv, attention)
EVERY = (*LAYERS, linear_long, partly_frozen, rms_norm, recurrent, sequence_bias)
# ExpandedWeights know F.linear, F.embedding, F.layer_norm, F.group_norm and convolutions.
SUPPORTED = {"hooks": EVERY, "functorch": EVERY, "ew": LAYERS, "ghost": EVERY}


VARIANTS = (("mean", "float32", 4), ("sum", "float32", 3), ("mean", "float64", 2), ("sum", "bfloat16", 5))


def all_cases() -> list[Case]:
    """Every family in every mode that supports it, in each variant of reduction, type and batch."""
    cases = []
    for mode, families in SUPPORTED.items():
        for reduction, dtype, batch in VARIANTS:
            for family in families:
                for case in family(batch, f.ITEMSIZE[dtype]):
                    if "linear4d" in case.name and mode == "ghost":
                        continue  # the norm sampler knows two and three dimensions, and returns nothing for four
                    cases.append(replace(case, mode=mode, reduction=reduction, dtype=dtype, adam=reduction == "mean"))
    return cases
