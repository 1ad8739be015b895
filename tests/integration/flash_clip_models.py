# SPDX-License-Identifier: Apache-2.0
"""Small models, data and training loops for the flash_clip tests."""

import copy
from collections.abc import Callable
from typing import Any

import opacus
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.clipping import FlashClipEngineMixin


class Engine(FlashClipEngineMixin, opacus.PrivacyEngine):
    """flash_clip on Opacus' own engine, without the profiler."""

    def __init__(self) -> None:
        super().__init__(accountant="rdp")


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=norm is nn.LayerNorm)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, width: int = 12, vocabulary: int = 17) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(2))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, groups=2, bias=False),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, padding=2, dilation=2),
        nn.Flatten(2),
        nn.Conv1d(24, 6, 5, stride=2),
        nn.Flatten(),
        nn.Linear(36, 10),
    )


def bottlenecks() -> nn.Module:
    """Convolutions with a kernel of one tap, most of which see fewer positions than their weights have rank."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=3),
        nn.Conv2d(16, 32, 1, bias=False),
        nn.GroupNorm(4, 32),
        nn.Conv2d(32, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 1, bias=False),
        nn.Conv2d(32, 16, 1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1, groups=2),
        nn.Conv2d(8, 6, 2),
        nn.Flatten(),
        nn.Linear(6, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 4, bias=False))


def token_data(samples: int, tokens: int = 5) -> TensorDataset:
    return TensorDataset(torch.randint(0, 17, (samples, tokens)), torch.randint(0, 17, (samples, tokens)))


def image_data(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3, 9, 9, dtype=torch.float64), torch.randint(0, 10, (samples,)))


def vector_data(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 9, dtype=torch.float64), torch.randint(0, 4, (samples,)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], TensorDataset]]] = {
    "transformer": (Transformer, token_data),
    "transformer_rms_norm": (lambda: Transformer(nn.RMSNorm), token_data),
    "convnet": (convnet, image_data),
    "bottlenecks": (bottlenecks, image_data),
    "mlp": (mlp, vector_data),
}


def criterion(reduction: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mean over tokens, and mean or sum over samples."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(output, target, reduction="none").unsqueeze(-1).flatten(1).mean(1)
        return each.mean() if reduction == "mean" else each.sum()

    return loss


def make_private(
    model: nn.Module, data: TensorDataset, mode: str, batch: int = 4, optimizer: Any = None, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """(module, optimizer, loader) with noise and sampling that repeat."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    arguments = {
        "noise_multiplier": 0.5,
        "max_grad_norm": 0.3,
        "poisson_sampling": False,
        "noise_generator": torch.Generator().manual_seed(11),
        **kwargs,
    }
    loader = DataLoader(data, batch_size=batch, generator=generator)
    private: tuple[Any, Any, Any] = Engine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode, **arguments
    )
    return private


def train(private: tuple[Any, Any, Any], reduction: str = "mean", steps: int = 3) -> None:
    module, optimizer, loader = private
    loss = criterion(reduction)
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()


def parameters(module: Any) -> dict[str, torch.Tensor]:
    return {n.removeprefix("_module."): p.detach().clone() for n, p in module.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_both(
    name: str, run: Callable[[tuple[Any, Any, Any]], None] = train, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters after the same training in hooks and in flash_clip mode."""
    torch.manual_seed(0)
    build, data = MODELS[name]
    model, samples = build().double(), data(12)
    flash = {k: v for k, v in kwargs.items() if k.startswith("flash_clip_")}
    common = {k: v for k, v in kwargs.items() if k not in flash}
    results = []
    for mode, options in (("hooks", common), ("flash_clip", {**common, **flash})):
        private = make_private(copy.deepcopy(model), samples, mode, **options)
        run(private)
        results.append(parameters(private[0]))
    assert any(not torch.equal(results[0][n], p) for n, p in model.named_parameters())  # it did train
    return results[1], results[0]
