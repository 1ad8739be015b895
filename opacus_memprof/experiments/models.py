# SPDX-License-Identifier: Apache-2.0
"""Builds the model of a configuration, from a built-in shape, the Hugging Face hub or a local path.

Also has the built-in GPT, from layers that every grad-sample mode supports.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from opacus_memprof.errors import MemprofError, require
from opacus_memprof.experiments.configuration import BUILT_IN, CLASSES, SIZES, Configuration, shape_of
from opacus_memprof.integrations.hub import load_pretrained, with_adapters

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Logits(nn.Module):
    """A model of transformers that takes token ids [batch, tokens] and returns its logits.

    Args:
        model: a model of transformers, perhaps with peft's adapters.
        padding: the token that attention ignores; None if no sample is padded.
    """

    def __init__(self, model: nn.Module, padding: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.padding = padding
        # The forward of a model with adapters accepts any argument: ask the inner model.
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._positions = "position_ids" in inspect.signature(inner.forward).parameters
        self._cache = "use_cache" in inspect.signature(inner.forward).parameters

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        extra: dict[str, Any] = {"use_cache": False} if self._cache else {}
        if self.padding is not None:
            extra["attention_mask"] = input_ids.ne(self.padding)
        if self._positions:
            # One row for each sample, because a row broadcast over the batch has no per-sample gradients.
            extra["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).repeat(len(input_ids), 1)
        logits: torch.Tensor = self.model(input_ids=input_ids, **extra).logits
        return logits


def build_model(configuration: Configuration, device: torch.device) -> nn.Module:
    """Builds the model in training mode on the device.

    It maps token ids [batch, tokens] to logits [batch, tokens, vocabulary], or [batch, classes] in classification.
    Layers that Opacus cannot train are replaced by equivalent ones: Conv1D of GPT-2 by Linear, and a head that is tied
    to trained embeddings by a copy.

    Raises:
        MemprofError: the model is unknown or cannot be loaded, it cannot be given adapters, or transformers or peft is
            missing.
    """
    torch.manual_seed(configuration.seed)
    family = "" if configuration.pretrained else shape_of(configuration)[0]
    if family == "transformer":
        model = _build_transformer(configuration, device)
        if configuration.lora_rank is not None:
            head = ["head"] if configuration.task == "classification" else None
            names = ["qkv", "out", "up", "down"]
            model = _add_adapters(model, configuration, target_modules=names, modules_to_save=head)
        return model.to(device).train()
    transformers = require("transformers", "language models")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = _load_pretrained(configuration) if configuration.pretrained else _build_random(configuration, device)
    replace_conv1d(model)
    model.config.pad_token_id = padding = _padding_token(model.config)
    if configuration.seq_length > (longest := getattr(model.config, "max_position_embeddings", None) or 2**31):
        raise MemprofError(
            f'seq_length is {configuration.seq_length}, and "{configuration.model}" has {longest} positions: '
            "make it at most as long"
        )
    if configuration.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})  # Opacus supports this kind only
    if configuration.lora_rank is None:
        _untie_head(model)
    else:
        task = "CAUSAL_LM" if configuration.task == "language_model" else "SEQ_CLS"
        model = _add_adapters(model, configuration, task_type=task)
    return Logits(model, padding if configuration.pretrained else None).to(device).train()


def vocabulary_size(model: nn.Module) -> int:
    """Returns the number of tokens in the model's vocabulary."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return sizes[0]


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Returns the numbers of all parameters and of trained ones. Shared parameters count once."""
    return {
        "total": sum(parameter.numel() for parameter in model.parameters()),
        "trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    }


def _build_transformer(configuration: Configuration, device: torch.device) -> nn.Module:
    sizes = shape_of(configuration)[1]
    with _default_placement(configuration, device):
        return Transformer(
            sizes["vocab_size"],
            sizes["hidden_dim"],
            sizes["num_layers"],
            sizes["num_heads"],
            configuration.seq_length,
            CLASSES if configuration.task == "classification" else None,
            checkpointing=configuration.checkpointing,
            **{name: value for name, value in sizes.items() if name not in SIZES},
        )


def _build_random(configuration: Configuration, device: torch.device) -> Any:
    import transformers

    family, sizes = shape_of(configuration)
    common: dict[str, Any] = {"num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    if family == "gpt2":
        positions = max(1024, configuration.seq_length)
        config: Any = transformers.GPT2Config(n_positions=positions, **sizes, **common)
    else:
        config = transformers.LlamaConfig(**sizes, **common)
    with _default_placement(configuration, device):
        return getattr(transformers, _auto_class(configuration)).from_config(config)


def _load_pretrained(configuration: Configuration) -> Any:
    extra: dict[str, Any] = {}
    if configuration.task == "classification":  # replaces a head for other classes that the model may have
        extra = {"num_labels": CLASSES, "ignore_mismatched_sizes": True}
    remedy = (
        f"pass the path of a local copy (--model-name PATH), or use random weights in a built-in shape (--config "
        f"{'|'.join(BUILT_IN)})"
    )
    dtype = DTYPES[configuration.dtype]
    return load_pretrained(_auto_class(configuration), configuration.model, remedy, dtype=dtype, **extra)


def _padding_token(config: Any) -> int:
    """Returns the padding token of a model or, without one, the token that ends a text."""
    for token in (getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)):
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    return 0


def _auto_class(configuration: Configuration) -> str:
    return f"AutoModelFor{'SequenceClassification' if configuration.task == 'classification' else 'CausalLM'}"


def _add_adapters(model: nn.Module, configuration: Configuration, **options: Any) -> Any:
    rank = configuration.lora_rank or 0
    return with_adapters(model, rank, 2 * rank, **options)


@contextmanager
def _default_placement(configuration: Configuration, device: torch.device) -> Iterator[None]:
    """Creates weights on the device and in the dtype of the configuration inside the context, without copies."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[configuration.dtype])
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def replace_conv1d(model: nn.Module) -> None:
    """Replaces every Conv1D of transformers by a Linear with the transposed weight, which Opacus' modes support."""
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                inputs, outputs = child.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta")
                linear.weight = nn.Parameter(child.weight.detach().T.contiguous())
                linear.bias = nn.Parameter(child.bias.detach())
                setattr(module, name, linear)


def _untie_head(model: Any) -> None:
    """Replaces a head that shares the weight of the input embedding by a copy.

    The norm of the sum of both gradients is not the sum of their norms.
    """
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None and outputs.weight is inputs.weight:
        outputs.weight = nn.Parameter(outputs.weight.detach().clone())
        model.config.tie_word_embeddings = False


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

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

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = getattr(functional, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activation(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, *, activation: str, attention_bias: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, bias=attention_bias)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, activation)

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
        activation: the function between the layers of an MLP, by its name in torch.nn.functional.
        attention_bias: whether the layers of attention have biases.
        last_norm: whether there is a LayerNorm behind the last block.
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
        activation: str = "gelu",
        attention_bias: bool = True,
        last_norm: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, activation=activation, attention_bias=attention_bias) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width) if last_norm else nn.Identity()
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
