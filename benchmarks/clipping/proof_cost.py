# SPDX-License-Identifier: Apache-2.0
"""What flash_clip's guarantee costs: the net under every step, the proof at the first step, and its checks later.

``python -m benchmarks.clipping.proof_cost [--width 1024 --layers 24 --tokens 256 --batch 64]`` trains a transformer
with random tokens on the GPU (or a small one on the CPU) and prints JSON: ratios are paired, step by step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.clipping.bookkeeping.backward_pass import SumCheck


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def trainer(arguments: argparse.Namespace, check: str, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Transformer(arguments.width, arguments.layers, arguments.tokens, arguments.vocabulary).to(
        device, torch.bfloat16 if arguments.bf16 else torch.float32
    )
    module = GradSampleModuleFlashClip(model, check=check)
    optimizer: Any = DPOptimizerFlashClip(
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        module=module,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=arguments.batch,
    )
    ids = torch.randint(0, arguments.vocabulary, (arguments.batch, arguments.tokens), device=device)

    def step() -> None:
        optimizer.zero_grad()
        logits = module(ids)
        functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


@contextmanager
def without_net() -> Iterator[None]:
    """Steps inside do not check the norm of their sum."""
    replaced = {"add": lambda *_: None, "begin": lambda *_: None, "raise_if_beyond": lambda *_: 0.0}
    before = {name: getattr(SumCheck, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(SumCheck, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(SumCheck, name, function)


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = vars(arguments)
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"

    step = trainer(arguments, "off", device)
    found["first step, off, s"] = seconds(step, device)
    rounds, with_net = [], []
    for _ in range(arguments.rounds):
        with_net.append(min(seconds(step, device) for _ in range(2)))
        with without_net():
            rounds.append(with_net[-1] / min(seconds(step, device) for _ in range(2)))
    found["net, ratio"] = statistics.median(rounds)
    found["step, s"] = statistics.median(with_net)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds(step, device)
    found["peak of a step, GiB"] = peak(device)
    del step
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = trainer(arguments, "sometimes", device)
    times = [seconds(step, device)]
    found["first step, sometimes, s"] = times[0]
    found["peak of the first step, GiB"] = peak(device)
    print(json.dumps(found, indent=1), file=sys.stderr)  # what is known if the checks take too long
    times += [seconds(step, device) for _ in range(64)]
    usual = statistics.median(times[1:])
    # Checks at forwards 2, 4, 8, ..., 64: as many again until 1 024.
    extra = {n: times[n - 1] - usual for n in (2, 4, 8, 16, 32, 64)}
    found["extra seconds of checks"] = {n: round(t, 4) for n, t in extra.items()}
    mixing = statistics.median(extra[n] for n in (2, 4, 16, 32))
    explained = statistics.median(extra[n] for n in (8, 64))
    found["checks in 1000 steps, ratio"] = 1 + (7 * mixing + 3 * explained) / (1000 * usual)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
