# SPDX-License-Identifier: Apache-2.0
"""Models of many kinds whose training is large enough that memory is what the layers take, not a library's workspace.

They are meant for a virtual GPU, which computes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn

from tests.planted_models import Adapted, Transformer, llama, tagger

Batch = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EstimatedModel:
    """A training whose memory is estimated.

    Attributes:
        build: makes the model, on the CPU.
        batch: makes inputs and targets of so many samples.
        samples: of a batch.
        optimizer: its class.
        dtype: of the parameters.
        autocast: whether the forward runs under autocast to bfloat16.
        modes: those that can train it; "adopted" is hooks with adopt_grad_samples.
    """

    build: Callable[[], nn.Module]
    batch: Batch
    samples: int
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    modes: tuple[str, ...] = ("hooks", "ghost", "flash_clip")


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of Opacus, and a head on the last state."""

    def __init__(self, kind: Callable[..., nn.Module], width: int, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.cell = kind(width, width, batch_first=True, **options)
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.tokens(ids))[0][:, -1])


class TiedLayers(nn.Module):
    """Two Linear layers that share their weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


class TiedHead(Transformer):
    """A language model whose head has the embedding's weight."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes)
        self.head = nn.Linear(sizes["width"], sizes["vocabulary"], bias=False)
        self.head.weight = self.tokens.weight


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(y)))


class Repeated(nn.Module):
    """A Linear layer that runs three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return self.head(x)


class VisionTransformer(nn.Module):
    """A model with parameters of its own, all of which Opacus then samples by functorch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 65, width))
        self.patches = nn.Linear(192, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1) + self.positions
        for block in self.blocks:
            x = x + block(x)
        return self.head(x[:, 0])


class Scaled(nn.Module):
    """A residual block with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(torch.relu(self.first(x)))


class UNet(nn.Module):
    """Convolutions with a skip connection, whose ends are concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, channels, 3, padding=1), Residual(channels)
        self.wide = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = Residual(2 * channels)
        self.narrow, self.up = nn.Conv2d(3 * channels, channels, 3, padding=1), Residual(channels)
        self.out = nn.Conv2d(channels, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(self.first(x))
        deep = nn.functional.interpolate(self.middle(self.wide(skipped)), scale_factor=2)
        return self.out(self.up(self.narrow(torch.cat([skipped, deep], 1)))).permute(0, 2, 3, 1)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def adapted_attention(sizes: dict[str, int]) -> nn.Module:
    """A language model that is frozen, its head too, with adapters in attention."""
    model = Transformer(sizes).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapter(block.attention.qkv)
    return model


class Messages(nn.Module):
    """A graph network in plain operations between its layers: all are in one forward."""

    def __init__(self, width: int, nodes: int, edges: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.register_buffer("source", torch.arange(edges) % nodes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for message, update in zip(self.messages, self.updates, strict=True):
            sums = torch.zeros_like(x).index_add(1, self.source, message(x)[:, self.source])
            x = torch.relu(update(torch.cat([x, sums], -1)))
        return self.head(x.mean(1))


def vectors(width: int, classes: int) -> Batch:
    return lambda n: (torch.zeros(n, width), torch.zeros(n, dtype=torch.long))


def sequences(length: int, width: int) -> Batch:
    return lambda n: (torch.zeros(n, length, width), torch.zeros(n, length, dtype=torch.long))


def images(channels: int, *size: int) -> Batch:
    return lambda n: (torch.zeros(n, channels, *size), torch.zeros(n, dtype=torch.long))


def tokens(length: int, *, labelled: bool = False) -> Batch:
    shape = (length,) if not labelled else ()
    return lambda n: (torch.zeros(n, length, dtype=torch.long), torch.zeros(n, *shape, dtype=torch.long))


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def pooled(features: int, *layers: nn.Module, one_dimension: bool = False) -> nn.Module:
    pool = nn.AdaptiveAvgPool1d(1) if one_dimension else nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(features, 10))


def text(**sizes: int) -> dict[str, int]:
    return {"vocabulary": 4000, "width": 256, "heads": 4, "blocks": 3} | sizes


ADAM, BF16 = torch.optim.AdamW, torch.bfloat16
ALL = ("hooks", "ghost", "flash_clip")
NOT_GHOST = ("hooks", "flash_clip")  # Opacus refuses tied parameters in ghost clipping
TAGS = {"vocabulary": 2000, "width": 512, "layers": 4, "out": 1000}

MODELS: dict[str, EstimatedModel] = {
    "wide MLP": EstimatedModel(lambda: mlp(2048, 4096, 1000), vectors(2048, 1000), 32, ADAM),
    "narrow deep MLP": EstimatedModel(lambda: mlp(256, *[256] * 24, 10), vectors(256, 10), 2048),
    "MLP in bfloat16": EstimatedModel(lambda: mlp(2048, 4096, 1000), vectors(2048, 1000), 64, dtype=BF16),
    "MLP with autocast": EstimatedModel(lambda: mlp(2048, 4096, 1000), vectors(2048, 1000), 64, ADAM, autocast=True),
    "MLP of short sequences": EstimatedModel(lambda: mlp(512, 2048, 512, 100), sequences(16, 512), 256, ADAM),
    "MLP of long sequences": EstimatedModel(
        lambda: mlp(256, 256, 256, 64, activation=nn.GELU), sequences(4096, 256), 16
    ),
    "transformer, short": EstimatedModel(lambda: Transformer(text()), tokens(64), 128, ADAM),
    "transformer, long": EstimatedModel(lambda: Transformer(text()), tokens(1024), 16, ADAM),
    "transformer in bfloat16": EstimatedModel(lambda: Transformer(text()), tokens(256), 32, ADAM, dtype=BF16),
    "transformer with autocast": EstimatedModel(lambda: Transformer(text()), tokens(256), 32, ADAM, autocast=True),
    "Llama": EstimatedModel(lambda: llama(text()), tokens(512), 16, ADAM),
    "LayerNorm after every Linear": EstimatedModel(
        lambda: tagger(nn.GELU, normalized=True)(TAGS), tokens(128), 128, ADAM
    ),
    "one label for each text": EstimatedModel(
        lambda: tagger(nn.GELU, pooled=True)(TAGS | {"out": 10}), tokens(256, labelled=True), 128
    ),
    "large vocabulary": EstimatedModel(
        lambda: tagger(nn.ReLU, pooled=True)(TAGS | {"vocabulary": 200_000, "width": 256, "out": 10}),
        tokens(64, labelled=True),
        8,
    ),
    "large vocabulary in bfloat16": EstimatedModel(
        lambda: tagger(nn.ReLU)(TAGS | {"vocabulary": 50_000, "width": 128, "out": 50_000}), tokens(32), 8, dtype=BF16
    ),
    "tied head": EstimatedModel(lambda: TiedHead(text()), tokens(128), 64, ADAM, modes=NOT_GHOST),
    "tied layers": EstimatedModel(lambda: TiedLayers(2048), vectors(2048, 10), 64, modes=NOT_GHOST),
    "LoRA": EstimatedModel(
        lambda: nn.Sequential(*(Adapted(1024, 8) for _ in range(4)), nn.Linear(1024, 16)), sequences(1024, 1024), 16
    ),
    "LoRA in bfloat16": EstimatedModel(
        lambda: nn.Sequential(*(Adapted(1024, 8) for _ in range(4)), nn.Linear(1024, 16)),
        sequences(1024, 1024),
        16,
        dtype=BF16,
    ),
    "LoRA in attention, frozen head": EstimatedModel(lambda: adapted_attention(text()), tokens(256), 32, ADAM),
    "U-Net": EstimatedModel(
        lambda: UNet(32), lambda n: (torch.zeros(n, 3, 64, 64), torch.zeros(n, 64, 64, dtype=torch.long)), 32, ADAM
    ),
    "messages of a graph": EstimatedModel(lambda: Messages(128, 256, 1024), images(256, 64), 64, ADAM),
    "convolutions": EstimatedModel(
        lambda: pooled(64, nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        images(3, 96, 96),
        32,
    ),
    "residual convolutions with GroupNorm": EstimatedModel(
        lambda: pooled(64, nn.Conv2d(3, 64, 7, stride=2, padding=3), *(Residual(64) for _ in range(3))),
        images(3, 112, 112),
        32,
        ADAM,
    ),
    "wide convolutions": EstimatedModel(
        lambda: pooled(
            512, nn.Conv2d(256, 512, 3, padding=1), nn.GroupNorm(32, 512), nn.ReLU(), nn.Conv2d(512, 512, 3, padding=1)
        ),
        images(256, 14, 14),
        64,
    ),
    "convolutions in one dimension": EstimatedModel(
        lambda: pooled(
            128, nn.Conv1d(32, 128, 9, padding=4), nn.ReLU(), nn.Conv1d(128, 128, 9, padding=4), one_dimension=True
        ),
        images(32, 2048),
        32,
    ),
    "strided convolutions": EstimatedModel(
        lambda: pooled(256, nn.Conv2d(3, 96, 4, stride=4), nn.ReLU(), nn.Conv2d(96, 256, 3, stride=2, padding=1)),
        images(3, 224, 224),
        64,
    ),
    "grouped convolutions": EstimatedModel(
        lambda: pooled(
            256,
            nn.Conv2d(64, 128, 3, groups=4, padding=1),
            nn.GroupNorm(4, 128),
            nn.ReLU(),
            nn.Conv2d(128, 256, 3, groups=8, padding=1),
        ),
        images(64, 32, 32),
        64,
        ADAM,
    ),
    "depthwise convolutions": EstimatedModel(
        lambda: pooled(
            256, nn.Conv2d(128, 128, 3, groups=128, padding=1), nn.Conv2d(128, 256, 1), nn.GroupNorm(8, 256), nn.ReLU()
        ),
        images(128, 32, 32),
        64,
    ),
    "convolutions in bfloat16": EstimatedModel(
        lambda: pooled(128, nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1)),
        images(64, 48, 48),
        64,
        dtype=BF16,
    ),
    "LSTM": EstimatedModel(lambda: Recurrent(DPLSTM, 512), tokens(32, labelled=True), 64),
    "GRU of two layers": EstimatedModel(
        lambda: Recurrent(DPGRU, 256, num_layers=2), tokens(64, labelled=True), 64, ADAM
    ),
    "LSTM in both directions": EstimatedModel(
        lambda: Recurrent(DPLSTM, 256, bidirectional=True), tokens(64, labelled=True), 32, ADAM
    ),
    "LSTM of characters": EstimatedModel(
        lambda: Recurrent(DPLSTM, 128), tokens(64, labelled=True), 512, modes=(*ALL, "adopted")
    ),
    "RNN": EstimatedModel(lambda: Recurrent(DPRNN, 700), tokens(30, labelled=True), 64, modes=(*ALL, "adopted")),
    "a layer that runs three times": EstimatedModel(lambda: Repeated(1024), vectors(1024, 10), 64, modes=NOT_GHOST),
    "vision transformer": EstimatedModel(
        lambda: VisionTransformer(256),
        lambda n: (torch.zeros(n, 64, 192), torch.zeros(n, dtype=torch.long)),
        32,
        ADAM,
        modes=(*ALL, "adopted"),
    ),
    "blocks with parameters of their own": EstimatedModel(
        lambda: nn.Sequential(nn.Linear(512, 512), *[Scaled(512) for _ in range(4)], nn.Linear(512, 10)),
        vectors(512, 10),
        128,
        modes=(*ALL, "adopted"),
    ),
}
