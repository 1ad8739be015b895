# SPDX-License-Identifier: Apache-2.0
"""The models of the clipping benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.experiments.models import Logits, Transformer


@dataclass(frozen=True)
class Config:
    """One model and batch. ``loss`` and ``batch`` are made from the logits' and inputs' shapes."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    tokens: int  # 0: images
    classes: int
    dtype: torch.dtype = torch.float32
    image: int = 0

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tokens:
            shape = (self.batch, self.tokens)
            return (torch.randint(0, self.classes, shape, device=device) for _ in range(2))  # type: ignore[return-value]
        x = torch.randn(self.batch, 3, self.image, self.image, device=device, dtype=self.dtype)
        return x, torch.randint(0, self.classes, (self.batch,), device=device)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.GroupNorm(32, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.GroupNorm(32, 4 * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride=stride, bias=False), nn.GroupNorm(32, 4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        out = functional.relu(self.norm2(self.conv2(out)))
        return functional.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """ResNet-50 with group instead of batch normalisation (with ``blocks`` as they are)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inside = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for i in range(count):
            layers.append(Bottleneck(inside, width, stride=2 if stage and i == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def gpt2_lora(rank: int = 16, tokens: int = 1024, **sizes: int) -> nn.Module:
    """GPT-2 (124 M parameters, random) with LoRA adapters on every projection."""
    import peft
    import transformers

    config = transformers.GPT2Config(n_positions=tokens, **sizes)
    adapters = peft.LoraConfig(r=rank, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return Logits(peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters))


def _gpt(tokens: int) -> Callable[[], nn.Module]:
    return lambda: Transformer(32000, 2048, 20, 16, tokens)


CONFIGS = [
    Config("S16384_B1_fp32", _gpt(16384), 1, 16384, 32000),
    Config("S16384_B1_bf16", _gpt(16384), 1, 16384, 32000, torch.bfloat16),
    Config("S2048_B8_bf16", _gpt(2048), 8, 2048, 32000, torch.bfloat16),
    Config("S512_B16_fp32", _gpt(512), 16, 512, 32000),
    Config("gpt2_lora16_S1024_B16", gpt2_lora, 16, 1024, 50257),
    Config("gpt2_small_S4096_B1_bf16", lambda: Transformer(50257, 768, 12, 12, 4096), 1, 4096, 50257, torch.bfloat16),
    Config("narrow_gpt_S32_B4", lambda: Transformer(64, 128, 24, 4, 32), 4, 32, 64),  # 24 layers: it waits for the host
    Config("resnet50_groupnorm_224_B32", resnet, 32, 0, 1000, image=224),
]

QUICK = [
    Config("quick_transformer", lambda: Transformer(64, 32, 2, 4, 24), 3, 24, 64),
    Config("quick_lora", lambda: gpt2_lora(4, 16, n_embd=32, n_layer=2, n_head=2, vocab_size=64), 2, 16, 64),
    Config("quick_resnet", lambda: resnet((1, 1), 10), 2, 0, 10, image=32),
]
