# SPDX-License-Identifier: Apache-2.0
"""The configurations of auto_mode.py: small and medium trainings of each kind, with few and with many samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.clipping.rivals_models import gpt2, llama, vit
from benchmarks.virtual_gpu.models import MODELS, Model, images, tokens
from opacus_memprof.experiments.models import Transformer


@dataclass(frozen=True)
class Configuration:
    """A model, the samples of a batch, and the type that it computes in."""

    model_name: str
    batch: int
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.model_name}, B {self.batch}, {'bf16' if self.dtype == torch.bfloat16 else 'fp32'}"

    @property
    def model(self) -> Model:
        return (MODELS | MORE)[self.model_name]


def _gpt(length: int, vocabulary: int, width: int, layers: int, heads: int) -> Model:
    return Model(lambda: Transformer(vocabulary, width, layers, heads, length), tokens(vocabulary, length))


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 784), torch.randint(10, (n,))


def _hugging_face(build: Callable[[], nn.Module], length: int, vocabulary: int) -> Model:
    return Model(build, tokens(vocabulary, length))


LLAMA_1B = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip

MORE = {
    "dense": Model(_dense, _vectors),
    "narrow GPT, 24 layers, T 32": _gpt(32, 1000, 128, 24, 4),
    "GPT of GPT-2's size, T 512": _gpt(512, 50257, 768, 12, 12),
    "GPT of GPT-2's size, T 4096": _gpt(4096, 50257, 768, 12, 12),
    "GPT-2 of transformers, T 512": _hugging_face(gpt2(512), 512, 50257),
    "Llama 1B LoRA, T 1024": _hugging_face(llama(1024, 16, **LLAMA_1B), 1024, 32000),
    "ViT-B/16": Model(vit(10), images(224)),
}

BF16 = torch.bfloat16
CONFIGURATIONS = [
    Configuration("dense", 256),
    Configuration("dense", 4096),
    Configuration("narrow GPT, 24 layers, T 32", 4),
    Configuration("narrow GPT, 24 layers, T 32", 64),
    Configuration("gpt-small", 8),
    Configuration("gpt-small", 64),
    Configuration("gpt", 8),
    Configuration("gpt", 1, BF16),
    Configuration("gpt", 32, BF16),
    Configuration("GPT of GPT-2's size, T 512", 8),
    Configuration("GPT of GPT-2's size, T 512", 16, BF16),
    Configuration("GPT of GPT-2's size, T 4096", 1, BF16),
    Configuration("gpt2", 8),
    Configuration("gpt2-lora", 8),
    Configuration("gpt2-lora", 32, BF16),
    Configuration("GPT-2 of transformers, T 512", 4),
    Configuration("llama", 8),
    Configuration("llama", 16, BF16),
    Configuration("llama-lora", 8),
    Configuration("llama-lora", 32, BF16),
    Configuration("Llama 1B LoRA, T 1024", 2, BF16),
    Configuration("bert", 16),
    Configuration("bert", 32, BF16),
    Configuration("t5-lora", 16),
    Configuration("mixtral-lora", 4),
    Configuration("text-cnn", 64),
    Configuration("dp-gru", 32),
    Configuration("dp-attention", 32),
    Configuration("wide-head", 64),
    Configuration("resnet18-private", 16),
    Configuration("resnet18-private", 64),
    Configuration("resnet50", 16),
    Configuration("vgg", 32),
    Configuration("vit", 16),
    Configuration("vit", 64, BF16),
    Configuration("ViT-B/16", 16, BF16),
    Configuration("cifar-cnn", 256),
    Configuration("cifar-cnn", 2048),
    Configuration("audio", 64),
    Configuration("unet", 16),
]
TINY = [Configuration("dense", 8), Configuration("cifar-cnn", 8)]
