# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT-like transformer with Opacus on made-up tokens. An ordinary script: it knows of no profiler.

Run it as it is, or under the profiler: `opacus-memprof run examples/train_transformer.py --mode ghost`; with
`--mode vanilla` it trains without privacy, to compare.
"""

import argparse
import contextlib
import math

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SIZES = {
    "cpu": {"vocabulary": 1000, "width": 96, "heads": 4, "blocks": 2, "length": 48, "batch": 8},
    "cuda": {"vocabulary": 8000, "width": 512, "heads": 8, "blocks": 6, "length": 256, "batch": 16},
}


class Attention(nn.Module):
    """Causal self-attention of Linear layers, which Opacus has per-sample gradients for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens (batch, length) to the next tokens' logits (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, heads: int, blocks: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        # A row of positions for every sample: Opacus reads the batch size off the first dimension.
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0], 1)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mode", default="hooks", choices=["hooks", "ghost", "vanilla"], help="Opacus' grad_sample_mode"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--max-physical-batch-size", type=int, help="samples of a backward pass: less memory")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    size = dict(SIZES[device])
    batch = args.batch_size or size["batch"]
    del size["batch"]

    torch.manual_seed(args.seed)
    text = torch.randint(size["vocabulary"], (args.steps * batch, size["length"] + 1))
    loader = DataLoader(TensorDataset(text), batch_size=batch)
    model = Transformer(**size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    if args.mode != "vanilla":
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=args.mode,
        )
        model, optimizer, *criteria, loader = made  # ghost clipping returns a criterion as well
        criterion = criteria[0] if criteria else criterion

    batches: contextlib.AbstractContextManager[DataLoader] = contextlib.nullcontext(loader)
    if args.max_physical_batch_size:
        batches = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=args.max_physical_batch_size, optimizer=optimizer
        )
    with batches as loader:
        for step, (tokens,) in enumerate(loader):
            tokens = tokens.to(device)
            inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
            optimizer.zero_grad()
            logits = model(inputs)
            if args.mode == "ghost":  # the criterion of ghost clipping needs to know which tokens make a sample
                loss = criterion(logits.flatten(0, 1), targets.flatten(), shape=logits.shape)
            else:
                loss = criterion(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
