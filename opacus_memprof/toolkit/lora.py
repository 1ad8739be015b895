# SPDX-License-Identifier: Apache-2.0
"""Creates and trains a language model with LoRA adapters, from a configuration.

Needs transformers and peft, which are loaded when they are used.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_memprof.errors import MemprofError, require
from opacus_memprof.integrations.hub import load_pretrained, with_adapters

TINY = "tiny"
_PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MODES = ("hooks", "functorch", "ew", "ghost", "flash_clip")
# A Llama with 115 thousand parameters and random weights.
_TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Settings:
    """The used settings of a configuration.

    Attributes:
        model: "tiny" (built in, random weights), a model's id on the Hugging Face hub or a local path, or a causal
            language model.
        r, alpha, dropout, target_modules: settings of LoRA; None lets peft choose the modules.
        batch_size, sequence_length, steps: sizes of synthetic batches, if no data loader is given.
        learning_rate: learning rate of AdamW.
        noise_multiplier: trains privately with Opacus; None trains without privacy.
        max_grad_norm, grad_sample_mode: settings of Opacus; the mode may also be "flash_clip".
    """

    model: Any = TINY
    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: Any = None
    batch_size: int = 4
    sequence_length: int = 32
    steps: int = 4
    learning_rate: float = 1e-3
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    grad_sample_mode: str = "hooks"

    def __post_init__(self) -> None:
        for name in ("r", "alpha", "batch_size", "sequence_length", "steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MemprofError(f"{name} is {value!r} in the configuration: give a whole number from 1 on")
        for name in ("dropout", "learning_rate", "noise_multiplier", "max_grad_norm"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
            if not number and (name, value) != ("noise_multiplier", None):
                raise MemprofError(f"{name} is {value!r} in the configuration: give a number from 0 on")
        if self.grad_sample_mode not in _MODES:
            raise MemprofError(
                f"grad_sample_mode is {self.grad_sample_mode!r} in the configuration: use {', '.join(_MODES)}"
            )


def read_settings(config: object) -> Settings:
    """Returns the settings in a mapping or in the attributes of an object. Other keys are ignored."""
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if values is None:
        raise MemprofError(f"a {type(config).__name__} is not a configuration: pass a dict")
    known = {field.name for field in fields(Settings)}
    return Settings(**{key: value for key, value in values.items() if key in known})


def parse_precision(precision: str) -> torch.dtype:
    """Returns the dtype of "fp32", "fp16" or "bf16". Raises MemprofError for any other precision."""
    if precision not in _PRECISIONS:
        raise MemprofError(f'there is no precision "{precision}": use {", ".join(_PRECISIONS)}')
    return _PRECISIONS[precision]


def choose_device(device: str) -> str:
    """Returns "cuda" or "cpu" for "auto", "cuda" or "cpu". Raises MemprofError if there is no such device here."""
    if device not in ("auto", "cuda", "cpu"):
        raise MemprofError(f'there is no device "{device}": use auto, cuda or cpu')
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise MemprofError("torch finds no CUDA device here: use the device cpu, or a virtual GPU")
    return "cuda" if available and device != "cpu" else "cpu"


def create_model(
    settings: Settings, precision: str = "fp32", token: str | None = None, device: str = "auto"
) -> nn.Module:
    """Creates the model with its adapters on the device. Frozen weights have `precision`, adapters fp32.

    Args:
        settings: the settings.
        precision: the dtype of frozen weights.
        token: token of the Hugging Face hub. Default: HF_TOKEN. It is not written to any file.
        device: see `choose_device`.

    Raises:
        MemprofError: transformers or peft is missing, the model cannot be loaded or adapted, or there is no such
            device.
    """
    dtype = parse_precision(precision)
    base = settings.model if isinstance(settings.model, nn.Module) else _load(str(settings.model), dtype, token)
    model: nn.Module = with_adapters(
        base,
        settings.r,
        settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
    )
    return model.to(choose_device(device))


def _load(model: str, dtype: torch.dtype, token: str | None) -> Any:
    if model == TINY:
        transformers = require("transformers", "language models")
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY_CONFIG)).to(dtype)
    return load_pretrained("AutoModelForCausalLM", model, f'use a local path, or "{TINY}"', token=token, dtype=dtype)


def vocabulary_size(model: nn.Module) -> int:
    """Returns the number of tokens in the vocabulary of a language model."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embeddings.weight.shape[0])


def synthetic_batches(settings: Settings, vocabulary: int) -> Any:
    """Returns a DataLoader of random tokens: `steps` batches of {"input_ids", "labels"}, [batch, tokens]."""
    generator = torch.Generator().manual_seed(0)
    shape = (settings.steps * settings.batch_size, settings.sequence_length)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    return DataLoader(samples, batch_size=settings.batch_size)  # type: ignore[arg-type]


@dataclass
class Training:
    """A model, its optimizer and its batches; with ghost clipping also the criterion that replaces the model's loss."""

    model: nn.Module
    optimizer: Any
    batches: Iterable[Any]
    criterion: Any = None


def prepare_training(model: nn.Module, batches: Iterable[Any], settings: Settings) -> Training:
    """Prepares training of the adapters with AdamW; private training if a noise multiplier is set.

    Raises:
        MemprofError: private training is given no data loader of torch, or flash_clip cannot clip the model.
    """
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate)
    if settings.noise_multiplier is None:
        return Training(model, optimizer, batches)
    from opacus import PrivacyEngine

    from opacus_memprof.clipping import FlashClipEngineMixin

    class Engine(FlashClipEngineMixin, PrivacyEngine):  # type: ignore[misc]
        """An engine for flash_clip that works without the compiled extension, which the package's engine needs."""

    if not isinstance(batches, DataLoader):
        raise MemprofError(
            f"private training needs a DataLoader of torch, and got a {type(batches).__name__}: pass one"
        )
    private, private_optimizer, *criterion, loader = Engine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=batches,
        noise_multiplier=settings.noise_multiplier,
        max_grad_norm=settings.max_grad_norm,
        poisson_sampling=False,
        grad_sample_mode=settings.grad_sample_mode,
    )
    return Training(private, private_optimizer, loader, *criterion)  # ghost clipping returns one, other modes do not


def train(training: Training, precision: str, after_step: Callable[[], object] = lambda: None) -> list[float]:
    """Trains for one epoch, calls `after_step` after each step, and returns the losses. Keeps the last gradients."""
    dtype = parse_precision(precision)
    device = next(training.model.parameters()).device
    losses = []
    for batch in _on_device(training.batches, device):
        training.optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = _loss(training, batch)
        loss.backward()
        training.optimizer.step()
        losses.append(float(loss.item()))
        after_step()
    return losses


def remove_opacus(training: Training) -> None:
    """Removes Opacus' hooks from a private model, which would keep the per-sample gradients of further passes."""
    restore = getattr(training.model, "to_standard_module", None)
    if restore is not None:
        restore()


def _loss(training: Training, batch: dict[str, torch.Tensor]) -> Any:
    tokens = batch.pop("input_ids")  # ew accepts them by position only
    if training.criterion is None:
        return training.model(tokens, **batch).loss
    targets = batch.pop("labels")[:, 1:]  # of the next token
    logits = training.model(tokens, **batch).logits[:, :-1].float()
    return training.criterion(logits.flatten(0, 1), targets.flatten(), shape=logits.shape)


def _on_device(batches: Iterable[Any], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the batches as dicts on the device, from dicts, (input_ids, labels) or input_ids.

    Labels default to input_ids.

    Raises:
        MemprofError: a batch has another type, or no input_ids.
    """
    for batch in batches:
        if isinstance(batch, torch.Tensor):
            batch = {"input_ids": batch}
        elif isinstance(batch, (list, tuple)):
            batch = dict(zip(("input_ids", "labels"), batch, strict=False))
        elif not isinstance(batch, Mapping):
            raise MemprofError(f"a {type(batch).__name__} is not a batch: give input_ids, or a dict with them")
        moved = {name: values.to(device) for name, values in batch.items() if isinstance(values, torch.Tensor)}
        if "input_ids" not in moved:
            raise MemprofError("a batch has no input_ids: give a tensor of tokens, or a dict with input_ids")
        yield {"labels": moved["input_ids"], **moved}
