# SPDX-License-Identifier: Apache-2.0
"""A GPT from layers that every grad-sample mode supports: learned positions, pre-norm blocks, an untied head."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return attended


class Mlp(nn.Module):
    """Two layers with a hidden width that is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Maps token ids [batch, tokens] to logits [batch, tokens, vocabulary].

    With `classes`, the logits are [batch, classes] of the last token.

    Args:
        vocabulary: number of tokens in the vocabulary.
        width: width of the residual stream; a multiple of `heads`.
        layers: number of blocks.
        heads: number of attention heads in every block.
        tokens: the longest sequence.
        classes: number of classes; None for a language model.
        checkpointing: whether a block keeps its input only, and recomputes the rest in backward.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        tokens: int,
        classes: int | None = None,
        *,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes or vocabulary, bias=False)
        self.classifies = classes is not None
        self.checkpointing = checkpointing

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # One row of positions for each sample, because a row broadcast over the batch has no per-sample gradients.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids).contiguous()
        x = self.tokens(input_ids) + self.positions(positions)
        if self.checkpointing and torch.is_grad_enabled() and not x.requires_grad:  # frozen embeddings, as with LoRA
            x.requires_grad_()
        for block in self.blocks:
            # The only kind that Opacus supports: its hooks do not see the first forward, which has no gradients.
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointing else block(x)
        x = self.norm(x)
        logits: torch.Tensor = self.head(x[:, -1] if self.classifies else x)
        return logits
