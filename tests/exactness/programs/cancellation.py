# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens or positions that cancel: the norm is a small rest of large terms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.exactness.judge import Batch, Step, step
from tests.exactness.program import Graph, Program, scales
from tests.exactness.tensors import select

_SIZES = {  # of the large terms, and of what remains of them
    torch.float32: (1e8, 8192.0),
    torch.float64: (1e12, 8192.0),
    torch.bfloat16: (2.0**27, 2.0**12),
    torch.float16: (2.0**15, 2.0**-2),
}
_NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _weighted(model: Any, batch: Batch) -> torch.Tensor:
    """The gradients of the outputs are the batch's ``g``."""
    output = model(batch["x"])
    return (output * batch["g"].to(output.dtype)).flatten(1).sum(1)


def _opposing(
    shape: tuple[int, ...],
    outputs: tuple[int, ...],
    dtype: torch.dtype,
    position_dim: int,
    sizes: tuple[float, float] | None = None,
) -> Any:
    """Returns inputs of 1/4 everywhere (or the same id), and output gradients that cancel.

    They are +K and -K + s at the first two positions, or +K, -K and s at the first three if -K + s would be rounded.
    """

    def steps() -> list[Step]:
        large, rest = sizes or _SIZES[dtype]
        x = torch.full(shape, 0.25, dtype=torch.float64) if len(shape) > 2 else torch.full(shape, 3)
        g = torch.zeros(outputs, dtype=torch.float64)
        g.select(position_dim, 0).fill_(large)
        if dtype in (torch.float32, torch.float64):
            g.select(position_dim, 1).fill_(rest - large)
        else:
            g.select(position_dim, 1).fill_(-large)
            g.select(position_dim, 2).fill_(rest)
        g[1] = torch.randn(g[1].shape, dtype=torch.float64).round(decimals=1)
        return [step({"x": x, "g": g})]

    return steps


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(64, 16), (4, 2, 64), (4, 2, 16), 1),
    "linear_without_bias": (lambda: nn.Linear(64, 16, bias=False), (4, 3, 64), (4, 3, 16), 1),
    "linear_4d": (lambda: nn.Linear(64, 16, bias=False), (4, 2, 2, 64), (4, 2, 2, 16), 1),
    "conv1d": (lambda: nn.Conv1d(32, 16, 1), (4, 32, 4), (4, 16, 4), 2),
    "conv2d": (lambda: nn.Conv2d(16, 16, 2, bias=False), (4, 16, 3, 3), (4, 16, 2, 2), 2),
    "embedding": (lambda: nn.Embedding(11, 16), (4, 3), (4, 3, 16), 1),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (4, 2, 8), (4, 2, 8), 1),
    "twice": (lambda: Graph(lambda m, x: m.a(m.a(x)), a=nn.Linear(32, 32, bias=False)), (4, 2, 32), (4, 2, 32), 1),
    "raw_parameter": (
        lambda: Graph(lambda m, x: x @ m.w, w=nn.Parameter(torch.ones(64, 16))),
        (4, 2, 64),
        (4, 2, 16),
        1,
    ),
}


def _weighted_uses(model: Any, batch: Batch) -> torch.Tensor:
    """The gradients of two outputs, each of one use of the same parameter, are the batch's."""
    outputs = model(batch["x"], batch["y"])
    own = zip(outputs, (batch["g"], batch["h"]), strict=True)
    return sum((o * g.to(o.dtype)).flatten(1).sum(1) for o, g in own)  # type: ignore[return-value]


def _opposing_uses(inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]], large: float, rest: float) -> Any:
    """Two uses of a parameter with output gradients of +K and -K + s."""

    def steps() -> list[Step]:
        x, y = inputs()
        g, h = torch.full((4, 3, 16), large).double(), torch.full((4, 3, 16), large).double()
        h = rest - h
        g[1], h[1] = torch.randn(2, 3, 16, dtype=torch.float64).round(decimals=1)
        return [step({"x": x, "y": y, "g": g, "h": h})]

    return steps


def _quarters(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.25, dtype=torch.float64)


USES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "two_calls": (
        lambda: Graph(lambda m, x, y: (m.a(x), m.a(y)), a=nn.Linear(64, 16, bias=False)),
        lambda: (_quarters(4, 3, 64), _quarters(4, 3, 64)),
    ),
    "two_embeddings": (
        lambda: Graph(lambda m, x, y: (m.a(x), m.a(y)), a=nn.Embedding(40, 16)),
        lambda: (torch.full((4, 3), 3), torch.full((4, 3), 3)),
    ),
    "two_convolutions": (
        lambda: Graph(lambda m, x, y: (m.a(x).mT, m.a(y).mT), a=nn.Conv1d(64, 16, 2, bias=False)),
        lambda: (_quarters(4, 64, 4), _quarters(4, 64, 4)),
    ),
}


def _labels(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["x"])
    return functional.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none").sum(1) * batch["scale"]


def _opposing_labels(spread: float) -> Callable[[], list[Step]]:
    """Two nearly equal tokens with opposing labels, as where a word is followed by either of two."""

    def steps() -> list[Step]:
        x = torch.randn(4, 1, 64, dtype=torch.float64) * torch.ones(1, 2, 1, dtype=torch.float64)
        x = x + spread * torch.randn(4, 2, 64, dtype=torch.float64)
        return [step({"x": x.float().double(), "y": torch.tensor([[0, 1]] * 4), "scale": scales(4)})]

    return steps


def _two_classes() -> nn.Module:
    """Many classes, of which the first two have a probability of one half."""
    layer = nn.Linear(64, 200)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, -20.0)
    nn.init.zeros_(layer.bias[:2])
    return layer


def _long(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) * batch["g"].to(batch["x"].dtype)).flatten(1).sum(1)


def _normalized(tokens: int, spread: float, centered: bool) -> Callable[[], list[Step]]:
    """Normalized inputs that have a direction in common, and output gradients of mean 0."""

    def steps() -> list[Step]:
        common = torch.randn(4, 1, 256, dtype=torch.float64)
        x = functional.layer_norm(common + spread * torch.randn(4, tokens, 256, dtype=torch.float64), (256,))
        g = torch.randn(4, tokens, 256, dtype=torch.float64)
        g = 1e3 * (g - g.mean(1, keepdim=True)) if centered else g
        return [step({"x": x.float().double(), "g": g.float().double()})]

    return steps


def _opposing_tokens() -> list[Step]:
    """Tokens in pairs that cancel, in a batch that is small without one of its samples (see layers/small_layers.py).

    A layer keeps tensors by another function when it sees their shapes for the second time.
    """
    x, g = torch.randn(2, 9, 200, 40, dtype=torch.float64)
    x[:, 100:], g[:, 100:] = x[:, :100], -g[:, :100]
    g = 1e7 * g + torch.randn(g.shape, dtype=torch.float64)
    batch = {"x": x.float().double(), "g": g.float().double()}
    return [step(batch), step(select(batch, list(range(8)))), step(batch)]


PROGRAMS = [
    Program(
        "cancel_layer_norm_in_two_ways",
        lambda: Graph(lambda m, x: m.a(x), a=nn.LayerNorm(40)),
        _opposing_tokens,
        "exact",
        _weighted,
        {"dtype": torch.float32},
    ),
    *(
        Program(
            f"cancel_{kind}_{_NAMES[dtype]}",
            build,
            _opposing(shape, outputs, dtype, dim),
            "exact",
            _weighted,
            {"dtype": dtype, "tolerance": None if dtype == torch.float32 else 1e-3},
        )
        for kind, (build, shape, outputs, dim) in KINDS.items()
        for dtype in (torch.float32, torch.float64)
    ),
    *(
        Program(
            f"cancel_{kind}_{_NAMES[dtype]}",
            KINDS[kind][0],
            _opposing(*KINDS[kind][1:3], dtype, KINDS[kind][3]),
            "exact",
            _weighted,
            {"dtype": dtype, "tolerance": 5e-2},
        )
        for kind in ("linear_without_bias", "embedding", "conv1d")
        for dtype in (torch.bfloat16, torch.float16)
    ),
    *(
        Program(
            f"cancel_linear_{_NAMES[dtype]}_two_passes",
            KINDS["linear"][0],
            _opposing(*KINDS["linear"][1:3], dtype, 1),
            "exact",
            _weighted,
            {"dtype": dtype, "passes": 2, "tolerance": 1e-3},
        )
        for dtype in (torch.float32, torch.float64)
    ),
    *(
        Program(
            f"cancel_{kind}_fp32_two_passes",
            build,
            _opposing(shape, outputs, torch.float32, dim),
            "exact",
            _weighted,
            {"dtype": torch.float32, "passes": 2},
        )
        for kind, (build, shape, outputs, dim) in KINDS.items()
        if kind != "linear"
    ),
    *(
        Program(
            f"cancel_{kind}_{_NAMES[dtype]}_two_passes",
            KINDS[kind][0],
            _opposing(*KINDS[kind][1:3], dtype, KINDS[kind][3]),
            "exact",
            _weighted,
            {"dtype": dtype, "passes": 2, "tolerance": 5e-2},
        )
        for kind in ("linear_without_bias", "embedding", "conv1d")
        for dtype in (torch.bfloat16, torch.float16)
    ),
    *(
        Program(
            f"cancel_{name}_{large:g}_passes_{passes}",
            build,
            _opposing_uses(inputs, large, rest),
            "exact",
            _weighted_uses,
            {"dtype": torch.float32, "passes": passes},
        )
        for name, (build, inputs) in USES.items()
        for large, rest in ((1e8, 8192.0), (1e12, 65536.0))
        for passes in (1, 2)
    ),
    *(
        Program(
            f"cancel_{kind}_1e12_passes_{passes}",
            KINDS[kind][0],
            _opposing(*KINDS[kind][1:3], torch.float32, KINDS[kind][3], (1e12, 65536.0)),
            "exact",
            _weighted,
            {"dtype": torch.float32, "passes": passes},
        )
        for kind in ("linear_without_bias", "embedding", "conv1d", "conv2d")
        for passes in (1, 2)
    ),
    *(
        Program(
            f"cancel_labels_{spread}",
            _two_classes,
            _opposing_labels(spread),
            "exact",
            _labels,
            {"dtype": torch.float32},
        )
        for spread in (1e-3, 1e-4, 1e-5)
    ),
    *(
        Program(
            f"cancel_normalized_{tokens}_{spread}",
            lambda: nn.Linear(256, 256),
            _normalized(tokens, spread, centered),
            "exact",
            _long,
            {"dtype": torch.float32},
        )
        for tokens, spread, centered in ((40, 1e-3, True), (40, 1e-4, True), (30, 1.0, False))
    ),
]
