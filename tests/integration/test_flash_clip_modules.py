# SPDX-License-Identifier: Apache-2.0
"""flash_clip clips modules of every kind as clipping by hand does, one sample at a time."""

import warnings
from collections.abc import Callable
from typing import Any

import opacus.layers
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.integration.clipping_by_hand import Batch, difference

SAMPLES, WIDTH, TOKENS, VOCABULARY = 4, 8, 5, 11


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mid(self.wte(ids)).tanh())
        return out


class TiedByFunction(Tied):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = functional.linear(self.mid(self.wte(ids)).tanh(), self.wte.weight, self.head.bias)
        return out


class Twice(nn.Module):
    """One layer that runs several times, and another under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.again = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.norm(self.first(x)).tanh() + self.again(x)
        return x


class Positions(nn.Module):
    """Position embeddings of one row of indices, as long as the batch."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.project = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(3))
        self.wpe, self.project = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dimensions = dimensions

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        positions = positions.unsqueeze(0) if self.dimensions == 2 else positions
        x: torch.Tensor = self.wte(ids) + self.project(self.wpe(positions))
        return x.square()


class RelativeBias(nn.Module):
    """Attention with a table of biases by distance, as T5's, made once for two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.qkv = nn.Embedding(2 * TOKENS, 2), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(places[:, None] - places[None, :] + TOKENS).permute(2, 0, 1)
        for _ in range(2):
            q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
            x = ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2) + x
        return x


class OwnParameters(nn.Module):
    """A class token, a scale and a gate, in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.gate, self.mix = nn.Parameter(torch.zeros(())), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        out: torch.Tensor = x * self.scale + self.gate.tanh() * self.mix(x)
        return out


class Folded(nn.Module):
    """Layers that see windows, or tokens, of all samples as their first dimension."""

    def __init__(self, token_major: bool) -> None:
        super().__init__()
        self.token_major = token_major
        self.linear, self.conv, self.norm = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = len(x)
        x = x.transpose(0, 1) if self.token_major else x
        flat = self.linear(x.reshape(-1, WIDTH)).tanh()
        flat = self.norm(self.conv(flat.unsqueeze(2)).squeeze(2))
        if self.token_major:
            return flat.view(-1, batch, WIDTH).transpose(0, 1)  # type: ignore[no-any-return]
        return flat.view(batch, -1, WIDTH)  # type: ignore[no-any-return]


class TokensFirst(nn.Module):
    """A transformer layer that has the tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return out


class Experts(nn.Module):
    """A mixture of experts, each of which sees the tokens that are routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return out.view_as(x)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(input=x)
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(WIDTH, WIDTH), OwnParameters(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return out


class DroppedGate(nn.Module):
    """A parameter whose gradient depends on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x * self.scale, 0.5) * self.scale


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


class Attention(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(WIDTH, 2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, x, x)[0]
        return out


def tokens() -> Batch:
    return {"x": torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))}


def vectors(*shape: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(SAMPLES, *(shape or (TOKENS, WIDTH)), dtype=torch.float64)}


def four_tokens() -> Batch:  # as many as there are samples
    return {"x": torch.randint(0, VOCABULARY, (SAMPLES, SAMPLES))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "tied": (Tied, tokens),
    "tied_padding": (lambda: Tied(padding_idx=3), tokens),
    "tied_by_function": (TiedByFunction, tokens),
    "twice": (Twice, vectors()),
    "twice_2d": (Twice, vectors(WIDTH)),
    "positions_1t": (lambda: Positions(2), tokens),
    "positions_t": (lambda: Positions(1), tokens),
    "positions_as_long_as_the_batch": (lambda: Positions(1), four_tokens),
    "relative_bias": (RelativeBias, vectors()),
    "own_parameters": (OwnParameters, vectors()),
    "folded": (lambda: Folded(False), vectors()),
    "folded_tokens_first": (lambda: Folded(True), vectors()),
    "tokens_first": (TokensFirst, vectors()),
    "experts": (Experts, vectors()),
    "keyword": (Keyword, vectors()),
    "checkpoint": (lambda: Checkpointed(False), vectors()),
    "checkpoint_reentrant": (lambda: Checkpointed(True), vectors()),
    "bilinear": (lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.PReLU(6), nn.Linear(6, 3)), vectors(WIDTH)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), vectors(2, 3, 4, 5)),
    "transposed_1d": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=2), vectors(2, 4)),
    "transposed_2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), vectors(4, 3, 4)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), vectors(4, 5, 5)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)), vectors()),
    "multihead_attention": (lambda: Attention(nn.MultiheadAttention, batch_first=True), vectors()),
    "multihead_attention_kdim": (lambda: Attention(nn.MultiheadAttention, batch_first=True, kdim=WIDTH), vectors()),
    "dp_multihead_attention": (lambda: Attention(opacus.layers.DPMultiheadAttention, batch_first=True), vectors()),
    "dp_multihead_bias": (
        lambda: Attention(opacus.layers.DPMultiheadAttention, batch_first=True, add_bias_kv=True),
        vectors(),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), vectors()),
    "dp_lstm": (lambda: Recurrent(opacus.layers.DPLSTM), vectors()),
    "dp_gru": (lambda: Recurrent(opacus.layers.DPGRU), vectors()),
    "dp_rnn": (lambda: Recurrent(opacus.layers.DPRNN), vectors()),
    "embedding_bag": (lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean"), tokens),
    "embedding_bag_max": (lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="max"), tokens),
    "transformer_layer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True), vectors()),
}


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(batch["x"])
    weights = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype)
    return (output.flatten(1) * weights).sum(1) + output.flatten(1).square().sum(1)


def randomized(build: Callable[[], nn.Module]) -> nn.Module:
    model = build().double().train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_modules_are_clipped_as_by_hand(name: str, passes: int) -> None:
    torch.manual_seed(0)
    build, batch = MODELS[name]
    assert difference(randomized(build), batch(), losses, passes=passes) < 1e-8


class AdaptedInForward(nn.Module):
    """A frozen parameter with a low-rank adapter, registered as a parametrization for one forward, as PEFT does.

    `requires_grad_` fails under vmap, before the clean-up begins.
    """

    class Added(nn.Module):
        def __init__(self, delta: torch.Tensor) -> None:
            super().__init__()
            self.delta = delta

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.delta

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.Added(self.b.weight @ self.a.weight)
        parametrize.register_parametrization(self.base, "weight", added)
        self.base.parametrizations["weight"].original.requires_grad_(False)
        try:
            y: torch.Tensor = self.base(x).tanh()
            return y
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_adapters_that_are_registered_for_each_forward() -> None:
    """Registering one sets the parameter to its own memory, which writes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), AdaptedInForward(), nn.Linear(WIDTH, 3)).double()
    batch = {"x": torch.randn(SAMPLES, WIDTH, dtype=torch.float64)}
    assert difference(model, batch, lambda model, batch: model(batch["x"]).square().flatten(1).sum(1)) < 1e-9


def test_operations_that_vmap_does_not_know_are_no_news() -> None:
    """torch asks to report them, but it is flash_clip that has put the module into vmap."""
    build, batch = MODELS["weight_norm"]
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert difference(randomized(build), batch(), losses) < 1e-8
        assert not [each for each in caught if "batching rule" in str(each.message)]
        torch.func.vmap(torch.histc)(torch.randn(3, 4))  # a program's own vmap still says so
        assert [each for each in caught if "batching rule" in str(each.message)]
