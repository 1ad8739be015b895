# SPDX-License-Identifier: Apache-2.0
"""The models that benchmarks/virtual_gpu/peaks.py trains, each with a batch that fits it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.clipping.models import resnet as resnet_of_bottlenecks
from benchmarks.virtual_gpu import convolution_cases
from opacus_memprof.experiments.models import Logits, Transformer, replace_conv1d

CLASSES = 10
WIDE_HEAD = 60_000


@dataclass(frozen=True)
class Model:
    """`build()` makes it on the CPU; `data(n)` makes n inputs and targets there."""

    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]


class MeanCrossEntropy(nn.Module):
    """Cross entropy of (n, classes) or (n, tokens, classes).

    The mean over a sample's tokens, then the reduction over samples. Ghost clipping asks for reduction `none`.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        losses = losses.view(len(targets), -1).mean(1)
        return {"none": losses, "mean": losses.mean(), "sum": losses.sum()}[self.reduction]


class Checkpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return out


def checkpoint_blocks(model: nn.Module, reentrant: bool) -> None:
    """Computes every block of a Transformer again in backward."""
    assert isinstance(model, Transformer)
    model.blocks = nn.ModuleList(Checkpointed(block, reentrant) for block in model.blocks)


# --- language ---


def tokens(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def data(n: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (n, length + 1))
        return ids[:, :-1].clone(), ids[:, 1:].clone()

    return data


def sentences(vocabulary: int, length: int, classes: int = CLASSES) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(1, vocabulary, (n, length)), torch.randint(classes, (n,)))


def _llama_config(**sizes: Any) -> Any:
    from transformers import LlamaConfig

    shape = {"vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    return LlamaConfig(**shape | heads | sizes, use_cache=False, tie_word_embeddings=False)


def llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    return Logits(LlamaForCausalLM(_llama_config()))


def _with_lora(model: nn.Module, targets: list[str], conv1d: bool = False) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets, fan_in_fan_out=conv1d)
    return Logits(get_peft_model(model, adapters))


def llama_lora() -> nn.Module:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_llama_config(hidden_size=1024, intermediate_size=2816))
    return _with_lora(model, ["q_proj", "k_proj", "v_proj", "o_proj"])


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=16000, n_positions=256, n_embd=512, n_layer=6, n_head=8, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2() -> nn.Module:
    """With dropout, and Linear in place of Conv1D."""
    model = _gpt2()
    replace_conv1d(model)
    return Logits(model)


def gpt2_lora() -> nn.Module:
    return _with_lora(_gpt2(), ["c_attn", "c_proj", "c_fc"], conv1d=True)


class Bert(nn.Module):
    """A classifier of sentences. Its position ids are repeated for every sample, as Opacus wants them."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=16000, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048,
            num_labels=CLASSES,
        )  # fmt: skip
        self.model = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        types = torch.zeros_like(ids)
        mask = ids.ne(0)
        logits: Tensor = self.model(ids, attention_mask=mask, token_type_ids=types, position_ids=positions).logits
        return logits


class T5(nn.Module):
    """An encoder and a decoder, trained to repeat the input; with LoRA, since Opacus knows no T5LayerNorm."""

    def __init__(self, lora: bool) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=16000, d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=8, decoder_start_token_id=0,
            tie_word_embeddings=False, use_cache=False, dropout_rate=0.0,
        )  # fmt: skip
        self.model: Any = T5ForConditionalGeneration(config)
        if lora:
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules=["q", "v"], lora_dropout=0.0))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, decoder_input_ids=ids).logits
        return logits


def mixtral(hidden: int, lora: bool) -> nn.Module:
    """Eight experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    return _with_lora(model, ["q_proj", "k_proj", "v_proj", "o_proj"]) if lora else Logits(model)


class TextCnn(nn.Module):
    """Convolutions of three widths over embedded words, and the largest value of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 128)
        self.convolutions = nn.ModuleList(nn.Conv1d(128, 128, width, padding=width // 2) for width in (3, 4, 5))
        self.head = nn.Linear(3 * 128, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        out: Tensor = self.head(torch.cat([functional.relu(c(x)).amax(dim=2) for c in self.convolutions], dim=1))
        return out


class Recurrent(nn.Module):
    """A recurrent layer over embedded words, and a Linear on its last state."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10000, 128)
        self.layer = layer(128, 256, batch_first=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.layer(self.embedding(ids))
        out: Tensor = self.head(states[:, -1])
        return out


class Attention(nn.Module):
    """Opacus' own attention over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10000, 256)
        self.attention = DPMultiheadAttention(256, 8, batch_first=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        out: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))
        return out


class WideHead(nn.Module):
    """The mean of embedded words, classified into very many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 256)
        self.head = nn.Linear(256, WIDE_HEAD)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids).mean(dim=1))
        return out


# --- images and sound ---


def images(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(CLASSES, (n,)))


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut. Nothing in place: Opacus' backward hooks do not allow it."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(32, outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.GroupNorm(32, outside)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.GroupNorm(32, outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """torchvision's, with group instead of batch normalisation. It adds its shortcuts in place."""
    import torchvision

    model: nn.Module = torchvision.models.resnet18(num_classes=CLASSES, norm_layer=lambda n: nn.GroupNorm(32, n))
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def resnet18_private() -> nn.Module:
    """The same, with nothing in place."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    for inside, outside in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [BasicBlock(inside, outside, 1 if inside == outside else 2), BasicBlock(outside, outside, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def vgg() -> nn.Module:
    """The convolutions of VGG-11, for images of 64 x 64."""
    layers: list[nn.Module] = []
    inside = 3
    for outside, pooled in ((64, 1), (128, 1), (256, 0), (256, 1), (512, 0), (512, 1), (512, 0), (512, 1)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        inside = outside
    head = [nn.Flatten(), nn.Linear(512 * 2 * 2, 512), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers, *head)


def vit() -> nn.Module:
    """Opacus knows no parameters outside of layers: the class token and the positions stay as they are."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, image_size=96,
        patch_size=8, num_labels=CLASSES,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("cls_token", "position_embeddings")):
            parameter.requires_grad_(False)
    return ImageLogits(model)


class ImageLogits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixels).logits
        return logits


def cifar_cnn() -> nn.Module:
    """The network of Opacus' CIFAR-10 example."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    head = [nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*layers, *head)


def audio() -> nn.Module:
    """One-dimensional convolutions over a waveform of one second at 16 kHz."""
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 80, stride=4), nn.GroupNorm(16, 64), nn.ReLU(), nn.MaxPool1d(4)]
    for inside, outside in ((64, 64), (64, 128), (128, 256)):
        layers += [nn.Conv1d(inside, outside, 3), nn.GroupNorm(16, outside), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, CLASSES))


class UNet(nn.Module):
    """Two levels down and up again; a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()

        def block(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU())

        self.down1, self.down2, self.bottom = block(3, 32), block(32, 64), block(64, 128)
        self.up2, self.up1 = block(128 + 64, 64), block(64 + 32, 32)
        self.head = nn.Conv2d(32, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        bottom = self.bottom(functional.max_pool2d(two, 2))
        y = self.up2(torch.cat([functional.interpolate(bottom, scale_factor=2), two], dim=1))
        y = self.up1(torch.cat([functional.interpolate(y, scale_factor=2), one], dim=1))
        return self.head(y).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def pixels(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(CLASSES, (n, size * size)))


class Drawn(nn.Sequential):
    """The network that cases.drawn has drawn: its convolutions, some with a norm, and a classifier."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.convs = convolution_cases.network(random.Random(name))
        dims = len(self.convs[0].stride)
        for number, conv in enumerate(self.convs):
            suffix = f"{'Transpose' * conv.transposed}{dims}d"
            inside, outside = conv.input[1], conv.output()[1]
            self.append(
                getattr(nn, f"Conv{suffix}")(
                    inside,
                    outside,
                    conv.weight[2:],
                    conv.stride,
                    conv.padding,
                    dilation=conv.dilation,
                    groups=conv.groups,
                )
            )
            if number % 2:
                self.append(nn.GroupNorm(4, outside))
            self.append(nn.ReLU())
        pool = getattr(nn, f"AdaptiveAvgPool{dims}d")(1)
        self.extend([pool, nn.Flatten(), nn.Linear(self.convs[-1].output()[1], CLASSES)])

    def data(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, *self.convs[0].input[1:]), torch.randint(CLASSES, (n,))


def _gpt(vocabulary: int = 16000, width: int = 512, layers: int = 6, length: int = 256) -> Callable[[], nn.Module]:
    return lambda: Transformer(vocabulary, width, layers, 8, length)


MODELS = {
    "gpt": Model(_gpt(), tokens(16000, 256)),
    "gpt-small": Model(_gpt(8000, 256, 4, 128), tokens(8000, 128)),
    "llama": Model(llama, tokens(16000, 256)),
    "llama-lora": Model(llama_lora, tokens(16000, 256)),
    "gpt2": Model(gpt2, tokens(16000, 256)),
    "gpt2-lora": Model(gpt2_lora, tokens(16000, 256)),
    "bert": Model(Bert, sentences(16000, 128)),
    "t5": Model(lambda: T5(lora=False), tokens(16000, 128)),
    "t5-lora": Model(lambda: T5(lora=True), tokens(16000, 128)),
    "mixtral": Model(lambda: mixtral(128, lora=False), tokens(1000, 64)),
    "mixtral-lora": Model(lambda: mixtral(128, lora=True), tokens(1000, 64)),
    "text-cnn": Model(TextCnn, sentences(20000, 200)),
    "lstm": Model(lambda: Recurrent(nn.LSTM), sentences(10000, 48)),
    "dp-lstm": Model(lambda: Recurrent(DPLSTM), sentences(10000, 48)),
    "dp-gru": Model(lambda: Recurrent(DPGRU), sentences(10000, 48)),
    "dp-attention": Model(Attention, sentences(10000, 128)),
    "wide-head": Model(WideHead, sentences(20000, 64, WIDE_HEAD)),
    "resnet18": Model(resnet18, images(96)),
    "resnet18-private": Model(resnet18_private, images(96)),
    "resnet50": Model(lambda: resnet_of_bottlenecks(classes=CLASSES), images(128)),
    "vgg": Model(vgg, images(64)),
    "vit": Model(vit, images(96)),
    "cifar-cnn": Model(cifar_cnn, images(32)),
    "audio": Model(audio, lambda n: (torch.randn(n, 1, 16000), torch.randint(CLASSES, (n,)))),
    "unet": Model(UNet, pixels(64)),
}


def named(name: str) -> Model:
    """Returns the model of the list, or the drawn one, that has this name."""
    if name in MODELS:
        return MODELS[name]
    with torch.device("meta"):
        shapes = Drawn(name)
    return Model(lambda: Drawn(name), shapes.data)
