# SPDX-License-Identifier: Apache-2.0
"""Models that are large in one respect each, made from a dictionary of sizes, and their batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Softmax attention in plain operations, so that its T x T weights are activations."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SwiGLU(nn.Module):
    """The MLP of a Llama block: it keeps four tensors of the hidden width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Transformer(nn.Module):
    checkpoints = False

    def __init__(self, s: dict[str, int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s["vocabulary"], s["width"])
        self.blocks = nn.Sequential(*(Block(s["width"], s["heads"]) for _ in range(s["blocks"])))
        self.norm = nn.LayerNorm(s["width"])
        self.head = nn.Linear(s["width"], s["vocabulary"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpoints else block(x)
        return self.head(self.norm(x))


def llama(s: dict[str, int]) -> nn.Module:
    model = Transformer(s)
    for block in model.blocks:
        block.mlp = SwiGLU(s["width"])
    return model


class ValueDependent(Transformer):
    """Its forward looks at a value, so that shapes alone do not tell what it does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids if ids.max().item() >= 0 else ids[:1])


class Adapted(nn.Module):
    """A frozen Linear with a low-rank adapter beside it, as LoRA has it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.up(self.down(x))


class Tagger(nn.Module):
    """An embedding, Linear layers with what `activation` and `normalized` put behind each, and a head.

    The head classifies each token, or the mean of the tokens.
    """

    def __init__(self, s: dict[str, int], activation: type[nn.Module], normalized: bool, pooled: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s["vocabulary"], s["width"])
        self.layers = nn.Sequential()
        for _ in range(s["layers"]):
            self.layers.append(nn.Linear(s["width"], s["width"]))
            if normalized:
                self.layers.append(nn.LayerNorm(s["width"]))
            self.layers.append(activation())
        self.head = nn.Linear(s["width"], s["out"])
        self.pooled = pooled

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.tokens(ids))
        return self.head(x.mean(1) if self.pooled else x)


def tagger(
    activation: type[nn.Module] = nn.Identity, *, normalized: bool = False, pooled: bool = False
) -> Callable[[dict[str, int]], nn.Module]:
    return lambda s: Tagger(s, activation, normalized, pooled)


def mlp(s: dict[str, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(s["in"], s["hidden"]), nn.ReLU(), nn.Linear(s["hidden"], s["out"]))


def deep_mlp(s: dict[str, int]) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(s["layers"]):
        layers += [nn.Linear(s["in"], s["in"]), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(s["in"], s["out"]))


def adapters(s: dict[str, int]) -> nn.Module:
    blocks = [Adapted(s["in"], s["rank"]) for _ in range(s["layers"])]
    return nn.Sequential(*blocks, nn.Linear(s["in"], s["out"]))


def convolutions(s: dict[str, int]) -> nn.Module:
    c = s["channels"]
    stem = [nn.Conv2d(3, c, 3, padding=1), nn.GroupNorm(4, c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * c, s["out"]))


class Bag(nn.Module):
    """A large embedding and a small head."""

    def __init__(self, s: dict[str, int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s["vocabulary"], s["width"])
        self.head = nn.Linear(s["width"], s["out"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(ids).mean(1))


def vectors(s: dict[str, int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, s["in"]), torch.randint(s["out"], (n,))


def sequences(s: dict[str, int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, s["length"], s["in"]), torch.randint(s["out"], (n, s["length"]))


def texts(s: dict[str, int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(s["vocabulary"], (n, s["length"] + 1))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def labelled_texts(s: dict[str, int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(s["vocabulary"], (n, s["length"])), torch.randint(s["out"], (n,))


def tagged_texts(s: dict[str, int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(s["vocabulary"], (n, s["length"])), torch.randint(s["out"], (n, s["length"]))


def images(s: dict[str, int], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, s["length"], s["length"]), torch.randint(s["out"], (n,))
