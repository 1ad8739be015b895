# SPDX-License-Identifier: Apache-2.0
"""A small GPT from layers that every mode of Opacus knows."""

import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.experiments.models import Block


class SmallGPT(nn.Module):
    """tokens [batch, length] → logits [batch, length, vocabulary].

    Positions are sinusoidal: no parameter whose input has another batch size.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, activation="gelu", attention_bias=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        rate = torch.exp(torch.arange(0, x.shape[-1], 2, device=tokens.device, dtype=x.dtype) * -0.01)
        x = x + torch.cat([torch.sin(place[:, None] * rate), torch.cos(place[:, None] * rate)], dim=-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lm_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy; logits [batch, length, vocabulary], targets [batch, length]."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
