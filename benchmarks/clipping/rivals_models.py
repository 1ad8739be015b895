# SPDX-License-Identifier: Apache-2.0
"""The configurations on which papers on fast clipping publish, from public shapes with random weights.

Each has a small copy, of the same layers, on which it is checked whether a rival clips exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.clipping.models import Config, resnet
from opacus_memprof.experiments.models import Logits, Transformer


@dataclass(frozen=True)
class Published:
    """Time and peak relative to training without privacy, as others give them; None: not given."""

    time_ratio: float | None
    peak_ratio: float | None
    source: str


@dataclass(frozen=True)
class RivalConfig:
    """A configuration and its small copy.

    Attributes:
        config: what is timed.
        small: what is checked, and all that `--tiny` runs.
        paper: who publishes on it.
        published: by mode, or by the name of a system that is not run here.
    """

    config: Config
    small: Config
    paper: str
    published: dict[str, Published] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.config.name


class ImageLogits(nn.Module):
    """A model of transformers that takes images and returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(pixel_values=x).logits
        return logits


def gpt2(tokens: int, **sizes: int) -> Callable[[], nn.Module]:
    """GPT-2 of transformers, all of it trained, its head untied from its embeddings; no dropout."""

    def build() -> nn.Module:
        import transformers

        config = transformers.GPT2Config(
            n_positions=tokens, tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
        )
        return Logits(transformers.GPT2LMHeadModel(config))

    return build


def vit(classes: int = 1000, **sizes: int) -> Callable[[], nn.Module]:
    """ViT-B/16 of transformers (with ``sizes`` as they are)."""

    def build() -> nn.Module:
        import transformers

        return ImageLogits(transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=classes, **sizes)))

    return build


LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def llama(tokens: int, lora_rank: int = 0, **sizes: int) -> Callable[[], nn.Module]:
    """Llama of transformers, all of it trained or, with a rank, LoRA adapters on every projection of its blocks.

    Its tables of positions are computed where other tensors have no memory yet, too (on the meta device).
    """

    def build() -> nn.Module:
        import transformers

        config = transformers.LlamaConfig(max_position_embeddings=tokens, tie_word_embeddings=False, **sizes)
        model: Any = transformers.LlamaForCausalLM(config)
        with torch.device("cpu"):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        if lora_rank:
            import peft

            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            model = peft.get_peft_model(model, peft.LoraConfig(r=lora_rank, target_modules=names))
        return Logits(model)

    return build


BOOK_KEEPING = "book-keeping (arXiv 2210.00038)"
# Batches and examples per second are the figure's, which is assets/nlp.png of fastDP's repository; examples of 100
# tokens, and GPT-2 by its size, are its examples/table2text/run.sh.
FIGURE = "its Figure 4, on an A100 of 40 GB"
SMALL_GPT = Config("small GPT", lambda: Transformer(31, 16, 2, 2, 12), 3, 12, 31)
SMALL_GPT2 = Config("small GPT-2", gpt2(12, n_embd=16, n_layer=2, n_head=2, vocab_size=31), 3, 12, 31)
SMALL_VIT = Config(
    "small ViT",
    vit(
        5,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    ),
    3,
    0,
    5,
    image=8,
)
SMALLEST_LLAMA = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _llama_8b(lora_rank: int, tokens: int) -> RivalConfig:
    trained = "lora" if lora_rank else "full"
    published = {}
    if not lora_rank:
        source = "its abstract, openreview.net/forum?id=1Q2NVxcSuS: 7 % behind training without privacy, on 4 H100"
        published = {"LongShield": Published(1.07, None, source)}
    return RivalConfig(
        Config(
            f"llama_8b_{trained}_T{tokens}_B1_bf16",
            llama(tokens, lora_rank, **LLAMA_8B),
            1,
            tokens,
            128256,
            torch.bfloat16,
        ),
        Config(f"small Llama, {trained}", llama(12, min(lora_rank, 2), **SMALLEST_LLAMA), 3, 12, 31),
        "LongShield",
        published,
    )


SHARDED_CONFIGS = [_llama_8b(lora_rank, tokens) for tokens in (4096, 16384) for lora_rank in (16, 0)]


def _long_gpt2(tokens: int) -> RivalConfig:
    config = Config(
        f"gpt2_T{tokens}_B1_bf16",
        lambda: Transformer(50257, 768, 12, 12, tokens),
        1,
        tokens,
        50257,
        torch.bfloat16,
    )
    return RivalConfig(config, SMALL_GPT, "FlashNorm")


CONFIGS = [
    RivalConfig(
        Config("gpt2_e2e_T100_B100_fp32", gpt2(100), 100, 100, 50257),
        SMALL_GPT2,
        BOOK_KEEPING,
        # Examples per second: 341 without privacy, 274 and 209.
        {"fastDP MixOpt": Published(341 / 274, None, FIGURE), "GhostClip": Published(341 / 209, None, FIGURE)},
    ),
    RivalConfig(
        Config(
            "gpt2_medium_e2e_T100_B50_fp32",
            gpt2(100, n_embd=1024, n_layer=24, n_head=16),
            50,
            100,
            50257,
        ),
        SMALL_GPT2,
        BOOK_KEEPING,
        {"fastDP MixOpt": Published(148 / 119, None, FIGURE), "GhostClip": Published(148 / 91, None, FIGURE)},
    ),
    _long_gpt2(4096),
    _long_gpt2(8192),
    _long_gpt2(16384),
    _long_gpt2(32768),
    RivalConfig(
        Config("resnet50_224_B32_fp32", resnet, 32, 0, 1000, image=224),
        Config("small ResNet", lambda: resnet((1,), 5), 2, 0, 5, image=16),
        BOOK_KEEPING,
    ),
    RivalConfig(
        Config("vit_b16_B64_fp32", vit(), 64, 0, 1000, image=224),
        SMALL_VIT,
        BOOK_KEEPING,
    ),
    SHARDED_CONFIGS[0],
]
