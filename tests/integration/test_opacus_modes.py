# SPDX-License-Identifier: Apache-2.0
"""Opacus' other modes, layers and ways to train: the run is the same, and each category holds what it should."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import opacus_memprof
from opacus_memprof.recording import native
from tests.integration.opacus_training import (
    BATCH,
    CLASSES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Model,
    Training,
    attached,
    batches,
    categories,
    cpu,  # noqa: F401
    prepare,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:In CPU autocast", "ignore:None of the inputs have requires_grad"
)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = DPLSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = DPMultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.attention(x, x, x)[0]).mean(dim=1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(self.embed(tokens).transpose(1, 2))).relu().mean(dim=2))


class Checkpointed(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(checkpoint(self.block, x, use_reentrant=True)).mean(dim=1)


class Autocast(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens).float()


class BiasOnly(Model):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("bias" in name or name.startswith("head"))


def lora() -> nn.Module:
    return get_peft_model(Model(), LoraConfig(r=2, target_modules=["block.1", "head"], lora_dropout=0.0))


def empty_batches() -> Any:
    """Poisson sampling so sparse that some batches are empty."""
    loader = batches()
    return DPDataLoader(loader.dataset, sample_rate=0.02, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Way:
    """A way to train: what `prepare` takes."""

    mode: str = "hooks"
    model: Callable[[], nn.Module] = Model
    engine: Callable[[], PrivacyEngine] = PrivacyEngine
    loader: Callable[[], Any] = batches
    options: dict[str, Any] = field(default_factory=dict)

    def prepare(self) -> Training:
        return prepare(self.mode, self.model, self.engine, self.loader, **self.options)


ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
}
WAYS = {
    "per_layer": Way(options={"clipping": "per_layer", "max_grad_norm": [1.0] * 7}),
    "adaptive": Way(options={"clipping": "adaptive", "unclipped_num_std": 1.0, **ADAPTIVE}),
    "adaptive ghost": Way("ghost", engine=PrivacyEngineAdaptiveClipping, options=ADAPTIVE),
    "not wrapped, hooks": Way(options={"wrap_model": False}),
    "not wrapped, functorch": Way("functorch", options={"wrap_model": False}),
    "not wrapped, ghost": Way("ghost", options={"wrap_model": False}),
    "sum": Way(options={"loss_reduction": "sum"}),
    "LSTM, hooks": Way(model=Recurrent),
    "LSTM, ghost": Way("ghost", Recurrent),
    "attention, hooks": Way(model=Attention),
    "attention, functorch": Way("functorch", Attention),
    "attention, ghost": Way("ghost", Attention),
    "convolution, hooks": Way(model=Convolution),
    "convolution, ew": Way("ew", Convolution),
    "convolution, ghost": Way("ghost", Convolution),
    "checkpointed, hooks": Way(model=Checkpointed),
    "checkpointed, ghost": Way("ghost", Checkpointed),
    "autocast, hooks": Way(model=Autocast),
    "autocast, ghost": Way("ghost", Autocast),
    "bias only, hooks": Way(model=BiasOnly),
    "bias only, ghost": Way("ghost", BiasOnly),
    "LoRA, hooks": Way(model=lora),
    "LoRA, functorch": Way("functorch", lora),
    "LoRA, ghost": Way("ghost", lora),
    "empty batches, hooks": Way(loader=empty_batches),
}


@pytest.mark.parametrize("name", WAYS)
def test_same_run_and_every_byte_has_a_name(name: str, cpu: None) -> None:  # noqa: F811
    way = WAYS[name]
    expected = way.prepare().run()
    gc.collect()
    others = categories()

    training = way.prepare()
    with attached(training):
        losses = training.run()
        before = categories()
        training.run()
        after = categories()

    assert torch.tensor(losses).equal(torch.tensor(expected)) or name == "empty batches, hooks"
    torch.testing.assert_close(losses, expected, rtol=0, atol=0, equal_nan=True)  # an empty batch has no mean
    assert len(losses) >= 3
    assert after == before  # nothing grows from one epoch to the next, under whatever name
    trained = [p for p in training.model.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    mine = {category: bytes_ - others.get(category, 0) for category, bytes_ in after.items()}
    assert mine["gradients"] == size
    assert mine["optimizer_states"] == 2 * size + 4 * len(trained)
    assert mine["model_parameters"] == sum(p.numel() * p.element_size() for p in training.model.parameters())
    leftovers = ("per_sample_gradients", "summed_gradients", "temp_matrices", "noise", "backprop_copies",
                 "activation_hooks_shared", "activation_hooks_opacus_only", "backward_temporaries",
                 "optimizer_temporaries")  # fmt: skip
    assert {category: mine[category] for category in leftovers} == dict.fromkeys(leftovers, 0)
    assert native.captures() == {}


def step_instants(training: Training) -> Iterator[dict[str, int]]:
    """The categories' changes in one step: after forward, after backward, after the update."""
    tokens, labels = next(iter(training.loader))
    before = categories()
    loss = training.criterion(training.model(tokens), labels)
    for proceed in (lambda: None, loss.backward, training.optimizer.step):
        proceed()
        yield {category: bytes_ - before[category] for category, bytes_ in categories().items()}


def test_autocast_keeps_inputs_that_autograd_does_not(cpu: None) -> None:  # noqa: F811
    """LayerNorm's float32 output is captured for the Linear, of which autograd saves a bfloat16 copy."""
    training = prepare("hooks", Autocast)
    with attached(training):
        after_forward, *_ = step_instants(training)
    positions = BATCH * LENGTH
    assert after_forward["activation_hooks_opacus_only"] == 4 * positions * WIDTH
    # The embedding's output, float32, which LayerNorm saves; the ReLU's, bfloat16, which the last Linear saves.
    assert after_forward["activation_hooks_shared"] == 4 * positions * WIDTH + 2 * positions * 4 * WIDTH


def test_bias_only_keeps_inputs_that_autograd_does_not(cpu: None) -> None:  # noqa: F811
    """With its weight frozen a Linear saves no input, but Opacus captures it for the bias."""
    training = prepare("hooks", BiasOnly)
    with attached(training):
        after_forward, *_ = step_instants(training)
    positions = BATCH * LENGTH
    assert after_forward["activation_hooks_opacus_only"] == 4 * positions * WIDTH  # block.1's
    assert after_forward["activation_hooks_shared"] == 4 * positions * (WIDTH + 4 * WIDTH)  # block.0's and head's


@pytest.mark.parametrize("detach_another", [False, True])
def test_samples_that_the_program_computes(detach_another: bool, cpu: None) -> None:  # noqa: F811
    """Mode no_op: they are known once the optimizer is asked to use them, be another such model detached or not."""
    training, other = prepare("no_op"), prepare("no_op")
    with attached(training):
        if detach_another:
            with attached(other):
                pass
        before = categories()
        tokens, labels = next(iter(training.loader))
        nn.CrossEntropyLoss()(training.model(tokens), labels).backward()
        for parameter in training.model.parameters():
            parameter.grad_sample = torch.randn(BATCH, *parameter.shape)
        training.optimizer.step()
        after = categories()
    size = 4 * sum(p.numel() for p in training.model.parameters())
    assert after["per_sample_gradients"] - before["per_sample_gradients"] == BATCH * size
    batch = sum(tensor.untyped_storage().nbytes() for tensor in (tokens, labels))
    assert after["inputs"] - before["inputs"] == batch
    assert after["model_parameters"] >= size


def test_accumulated_samples(cpu: None) -> None:  # noqa: F811
    """Two backward passes before a step: `grad_sample` is a list, and Opacus concatenates it to clip."""
    training = prepare("hooks")
    with attached(training):
        before = categories()
        for tokens, labels in (next(iter(training.loader)) for _ in range(2)):
            training.criterion(training.model(tokens), labels).backward()
        assert categories()["per_sample_gradients"] - before["per_sample_gradients"] == 2 * BATCH * (
            size := 4 * sum(p.numel() for p in training.model.parameters())
        )
        native.reset_peaks()
        training.optimizer.step()
    peak = native.peaks()["cpu"]
    assert peak["phase"] == "clip"
    # All parameters' samples concatenated, while the norm of the last is taken.
    concatenated = peak["categories"]["clipping_temporaries"] - before["clipping_temporaries"]
    assert concatenated >= 2 * BATCH * size


def test_secure_noise(cpu: None) -> None:  # noqa: F811
    """Four draws summed, and their half: all gone after the step."""
    training = prepare("hooks", lambda: nn.Sequential(nn.Embedding(VOCABULARY, 2), nn.Flatten(), nn.Linear(10, 3)))
    training.optimizer.secure_mode = True
    with attached(training):
        *_, after_backward, after_step = step_instants(training)
    assert after_backward["noise"] == after_step["noise"] == 0
    weights = [4 * p.numel() for p in training.model.parameters()]
    assert after_step["gradients"] == sum(weights)


def test_recurrent_layers_capture_every_time_step(cpu: None) -> None:  # noqa: F811
    training = prepare("hooks", Recurrent)
    with attached(training):
        instants = step_instants(training)
        next(instants)
        names = native.names()["modules"]
        captured = {names[module]: count for module, count in native.captures().items()}
        assert captured == {"embed": 1, "lstm.l0.ih": LENGTH, "lstm.l0.hh": LENGTH, "head": 1}
        next(instants)
        assert native.captures() == {}


def test_drop_in_engine(cpu: None, tmp_path: Path) -> None:  # noqa: F811
    """Follows what it returns while a session records, and is Opacus' own otherwise."""
    expected = prepare("ghost").run()
    assert prepare("ghost", engine=opacus_memprof.PrivacyEngine).run() == expected

    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        training = prepare("ghost", engine=opacus_memprof.PrivacyEngine)
        assert training.run() == expected
        breakdown = session.breakdown()["cpu"]
        assert native.step() == (4, 4)

    parameters = list(training.model.parameters())
    assert breakdown["norm_samples"] == 4 * BATCH * len(parameters)
    assert breakdown["model_parameters"] >= 4 * sum(p.numel() for p in parameters)
    assert vars(training.optimizer).keys().isdisjoint({"pre_step", "zero_grad"})
