# SPDX-License-Identifier: Apache-2.0
"""Small models of the kinds that people train with Opacus, each with a batch and a criterion, and a loop to train them.

All of them run in every mode: ExpandedWeights know only torch's own layers, so GPT-2's Conv1D is replaced by Linear;
ghost clipping forbids tied parameters, so embedding and head are apart; Opacus wants a batch dimension on every input
of a layer, so position ids are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from peft import LoraConfig, get_peft_model  # not in a test: peft makes tensors as it is imported, and keeps them
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.experiments.models import Logits, replace_conv1d

MODES = ("hooks", "functorch", "ew", "ghost", "no_op")


@dataclass(frozen=True)
class Model:
    """`batch(n)` returns n inputs and targets on the CPU."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]

    def __str__(self) -> str:
        return self.name


class MeanCrossEntropy(nn.Module):
    """Cross entropy of (n, classes) or (n, tokens, classes).

    The mean over a sample's tokens, then the reduction over samples. Ghost clipping asks for reduction `none`.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        losses = losses.view(len(targets), -1).mean(1)
        return {"none": losses, "mean": losses.mean(), "sum": losses.sum()}[self.reduction]


def gpt2() -> nn.Module:
    """Two blocks of GPT-2, all parameters trained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=211,
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=4,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    replace_conv1d(model)
    return Logits(model)


def llama_lora() -> nn.Module:
    """Two blocks of Llama, frozen, with LoRA adapters on the attention's projections."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return Logits(get_peft_model(LlamaForCausalLM(config), adapters))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    """A ResNet of two blocks with GroupNorm in place of BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        ResidualBlock(8, 16, 2),
        ResidualBlock(16, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


class LSTMClassifier(nn.Module):
    """Opacus' own LSTM over embedded tokens, and a Linear on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 24)
        self.lstm = DPLSTM(24, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(ids))
        return self.head(states[:, -1])


def _tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(211, (n, 25))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def _images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(10, (n,))


def _sentences(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(97, (n, 10)), torch.randint(5, (n,))


MODELS = (
    Model("gpt2", gpt2, _tokens),
    Model("llama-lora", llama_lora, _tokens),
    Model("resnet", resnet, _images),
    Model("lstm", LSTMClassifier, _sentences),
)


@dataclass
class Training:
    """What `make_private` returned, with a loop over fresh batches."""

    mode: str
    module: Any
    optimizer: Any
    criterion: Any
    loader: Any
    model: Model
    device: str

    def step(self, n: int = 6, filling: AbstractContextManager[Any] | None = None) -> torch.Tensor:
        """One step on a batch of n; under no_op, `filling` is around the per-sample gradients. Returns the loss."""
        inputs, targets = (t.to(self.device) for t in self.model.batch(n))
        loss = self.criterion(self.module(inputs), targets)
        loss.backward()
        if self.mode == "no_op":
            with filling or nullcontext():
                self.fill_grad_samples(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def fill_grad_samples(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """What the user of `no_op` does: here by torch.func."""
        model = self.module._module
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.criterion(functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))

        samples = vmap(grad(loss), in_dims=(None, 0, 0))(trained, inputs, targets)
        for name, parameter in model.named_parameters():
            parameter.grad_sample = samples.get(name)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self.module.parameters() if p.requires_grad)


def prepare(
    model: Model, mode: str, device: str = "cpu", engine: PrivacyEngine | None = None, **options: Any
) -> Training:
    """Builds the model with a fixed seed and makes it private; further options are make_private's."""
    torch.manual_seed(0)
    module = model.build().to(device).train()
    inputs, targets = model.batch(6)
    trained = [p for p in module.parameters() if p.requires_grad]
    module, optimizer, *criteria, loader = (engine or PrivacyEngine()).make_private(
        module=module,
        optimizer=torch.optim.AdamW(trained, lr=1e-3),
        criterion=MeanCrossEntropy(),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **options,
    )
    return Training(mode, module, optimizer, criteria[0] if criteria else MeanCrossEntropy(), loader, model, device)
