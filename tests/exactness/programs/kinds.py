# SPDX-License-Identifier: Apache-2.0
"""Every kind of layer in a clean program, in two precisions, one and two passes, whole, tied, adapted and twice."""

from collections.abc import Callable
from typing import Any

import opacus.layers
import torch
from torch import nn
from torch.nn import functional

from tests.exactness.judge import Batch, Step
from tests.exactness.program import Graph, Program, of_shape, several, token_ids

Steps = Callable[[], list[Step]]


def _ids(size: int = 5, tokens: int = 4) -> Steps:
    return several(lambda: token_ids(size, tokens), lambda: token_ids(size, tokens))


def _shape(*shape: int) -> Steps:
    return of_shape(*shape, count=2)


def _first(layer: nn.Module) -> nn.Module:
    """A layer whose output is the first of a tuple."""
    return Graph(lambda m, x: m.layer(x)[0], layer=layer)


def _attention(**options: Any) -> nn.Module:
    layer = nn.MultiheadAttention(6, 2, batch_first=True, **options)
    return Graph(lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=layer)


def _dp_attention() -> nn.Module:
    layer = opacus.layers.DPMultiheadAttention(6, 2)
    return Graph(
        lambda m, x: m.layer(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1), layer=layer
    )


def _between(layer: Callable[[], nn.Module], width: int, out: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(width, width), layer(), nn.Linear(out, 3))


class _Lora(nn.Module):
    """A frozen layer with trained factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + 2 * self.b(self.a(x))
        return out


class _RawLora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.a @ self.b
        return out


def _parameter(function: Callable[[Any, torch.Tensor], torch.Tensor], *shape: int) -> Callable[[], nn.Module]:
    return lambda: Graph(function, w=nn.Parameter(torch.randn(*shape)))


def _tokens_then(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(11, 6), layer(), nn.Linear(6, 3))


def _of_two_names() -> nn.Module:
    """As PEFT's trainable tokens, whose changes the embedding and the head hold in one module."""
    changes = nn.ParameterDict({"changes": nn.Parameter(torch.randn(3, 6))})

    def forward(m: Any, ids: torch.Tensor) -> torch.Tensor:
        weight = m.tokens.weight.index_add(0, torch.arange(1, 4), m.of_tokens["changes"])
        return m.last(torch.tanh(functional.embedding(ids, weight))) * m.of_head["changes"].sum()

    return Graph(forward, tokens=nn.Embedding(11, 6), of_tokens=changes, of_head=changes, last=nn.Linear(6, 3))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11, bias=False))
    model[2].weight = model[0].weight
    return model


def _tied_large(padding: int | None) -> Callable[[], nn.Module]:
    """So many rows that per-sample gradients are larger than what they are formed from."""

    def build() -> nn.Module:
        embedding = nn.Embedding(61, 6, padding_idx=padding)
        head = nn.Linear(6, 61, bias=False)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), head)

    return build


def _folded(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Tokens first, in one dimension with the samples."""
    flat = m.b(torch.tanh(m.a(x.transpose(0, 1).flatten(0, 1))))
    return flat.view(x.shape[1], len(x), -1).transpose(0, 1)


def _tokens_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.tanh(m.a(x.transpose(0, 1)))).transpose(0, 1)


def _tied_linears() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


def _tied_transposed() -> nn.Module:
    """An autoencoder whose decoder uses the encoder's weight."""
    return Graph(lambda m, x: torch.tanh(m.first(x)) @ m.first.weight, first=nn.Linear(6, 4))


class _Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _tied_transposed_large() -> nn.Module:
    """As ``_tied_transposed``, with gradients that are larger than what they are formed from."""
    first = nn.Linear(6, 61, bias=False)
    return nn.Sequential(first, nn.Tanh(), _Transposed(first.weight))


def _positions(m: Any, ids: torch.Tensor) -> torch.Tensor:
    return m.last(m.tokens(ids) + m.positions(torch.arange(ids.shape[1])))


def _class_token(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.cat([m.w.expand(len(x), -1, -1), m.first(x)], 1)
    return m.last(functional.scaled_dot_product_attention(h, h, h)[:, 0])


def _hidden_start(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A trained start of a recurrence."""
    h = m.w.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return h


LAYERS: dict[str, tuple[Callable[[], nn.Module], Steps]] = {
    "linear": (lambda: nn.Linear(6, 3), _shape(5, 6)),
    "linear_3d": (lambda: nn.Linear(6, 3), _shape(5, 4, 6)),
    "linear_4d": (lambda: nn.Linear(6, 3, bias=False), _shape(5, 2, 3, 6)),
    "bilinear": (lambda: Graph(lambda m, x: m.layer(x, x.flip(-1)), layer=nn.Bilinear(6, 6, 3)), _shape(5, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), _shape(5, 4, 6)),
    "conv1d_grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2, stride=2), _shape(5, 4, 7)),
    "conv1d_depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4, padding=2), _shape(5, 4, 6)),
    "conv1d_circular": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), _shape(5, 4, 6)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), _shape(5, 3, 5, 5)),
    "conv2d_dilated": (lambda: nn.Conv2d(3, 4, 2, dilation=2, bias=False), _shape(5, 3, 5, 6)),
    "conv2d_same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), _shape(5, 3, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), _shape(4, 2, 3, 3, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), _shape(5, 4, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), _shape(4, 3, 3, 3)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 2, 2), _shape(4, 2, 2, 3, 2)),
    "lazy_kernel_of_one": (lambda: nn.Conv2d(3, 4, 1), _shape(5, 3, 4, 4)),
    "embedding": (_tokens_then(nn.Identity), _ids()),
    "embedding_padding": (lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 3)), _ids()),
    "embedding_bag_sum": (lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="sum"), nn.Linear(6, 3)), _ids()),
    "embedding_bag_mean": (lambda: nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 3)), _ids()),
    "embedding_bag_max": (lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="max"), nn.Linear(6, 3)), _ids()),
    "layer_norm": (_between(lambda: nn.LayerNorm(6), 6, 6), _shape(5, 4, 6)),
    "layer_norm_2d": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((4, 6))), _shape(5, 4, 6)),
    "layer_norm_without_bias": (_between(lambda: nn.LayerNorm(6, bias=False), 6, 6), _shape(5, 6)),
    "rms_norm": (_between(lambda: nn.RMSNorm(6), 6, 6), _shape(5, 4, 6)),
    "group_norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.GroupNorm(2, 4)), _shape(5, 3, 4, 4)),
    "instance_norm1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True)), _shape(5, 3, 6)),
    "instance_norm2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.InstanceNorm2d(4, affine=True)),
        _shape(5, 3, 4, 4),
    ),
    "attention": (_attention, _shape(5, 4, 6)),
    "attention_extra": (lambda: _attention(add_bias_kv=True, bias=False), _shape(5, 4, 6)),
    "attention_dp": (_dp_attention, _shape(5, 4, 6)),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), _shape(5, 4, 6)),
    "lstm": (lambda: _first(nn.LSTM(6, 4, batch_first=True)), _shape(5, 4, 6)),
    "lstm_deep": (lambda: _first(nn.LSTM(6, 4, num_layers=2, batch_first=True)), _shape(5, 4, 6)),
    "lstm_both_ways": (lambda: _first(nn.LSTM(6, 3, bidirectional=True, batch_first=True)), _shape(5, 4, 6)),
    "lstm_projected": (lambda: _first(nn.LSTM(6, 4, proj_size=2, batch_first=True)), _shape(5, 4, 6)),
    "gru": (lambda: _first(nn.GRU(6, 4, batch_first=True)), _shape(5, 4, 6)),
    "rnn": (lambda: _first(nn.RNN(6, 4, batch_first=True)), _shape(5, 4, 6)),
    "lstm_dp": (lambda: _first(opacus.layers.DPLSTM(6, 4, batch_first=True)), _shape(5, 4, 6)),
    "gru_dp": (lambda: _first(opacus.layers.DPGRU(6, 4, batch_first=True)), _shape(5, 4, 6)),
    "rnn_dp": (lambda: _first(opacus.layers.DPRNN(6, 4, batch_first=True)), _shape(5, 4, 6)),
    "gru_cell": (
        lambda: Graph(_hidden_start, cell=nn.GRUCell(6, 4), w=nn.Parameter(torch.randn(1, 4))),
        _shape(5, 4, 6),
    ),
    "prelu": (_between(nn.PReLU, 6, 6), _shape(5, 6)),
    "prelu_by_channel": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.PReLU(4)), _shape(5, 3, 6)),
    "raw_matrix": (_parameter(lambda m, x: torch.tanh(x @ m.w), 6, 3), _shape(5, 4, 6)),
    "raw_scale": (_parameter(lambda m, x: x * m.w, 6), _shape(5, 4, 6)),
    "raw_number": (_parameter(lambda m, x: x * m.w.exp(), 1), _shape(5, 4, 6)),
    "raw_einsum": (_parameter(lambda m, x: torch.einsum("btd,hde->bhte", x, m.w), 2, 6, 3), _shape(5, 4, 6)),
    "raw_experts": (
        _parameter(lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), 4, 6, 3),
        _shape(5, 4, 6),
    ),
    "raw_class_token": (
        lambda: Graph(_class_token, first=nn.Linear(6, 6), last=nn.Linear(6, 3), w=nn.Parameter(torch.randn(1, 1, 6))),
        _shape(5, 4, 6),
    ),
    "positions": (
        lambda: Graph(_positions, tokens=nn.Embedding(11, 6), positions=nn.Embedding(8, 6), last=nn.Linear(6, 3)),
        _ids(),
    ),
    "positions_of_the_batch_s_size": (
        lambda: Graph(_positions, tokens=nn.Embedding(11, 6), positions=nn.Embedding(8, 6), last=nn.Linear(6, 3)),
        _ids(4, 4),
    ),
    "tied": (_tied, _ids()),
    "raw_of_two_names": (_of_two_names, _ids()),
    "tied_large": (_tied_large(None), _ids()),
    "tied_large_padding": (_tied_large(3), _ids()),
    "folded": (lambda: Graph(_folded, a=nn.Linear(6, 6), b=nn.Linear(6, 3)), _shape(5, 4, 6)),
    "tokens_first": (lambda: Graph(_tokens_first, a=nn.Linear(6, 6), b=nn.Linear(6, 3)), _shape(5, 4, 6)),
    "tied_linears": (_tied_linears, _shape(5, 4, 6)),
    "layer_norm_eps": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, eps=0.1), nn.Linear(6, 3)),
        _shape(5, 4, 6),
    ),
    "conv2d_pointwise_strided": (lambda: nn.Conv2d(4, 3, 1, stride=2), _shape(5, 4, 5, 5)),
    "tied_transposed_large": (_tied_transposed_large, _shape(5, 6)),
    "tied_transposed": (_tied_transposed, _shape(5, 4, 6)),
    "lora": (lambda: nn.Sequential(_Lora(), nn.GELU(), _Lora()), _shape(5, 4, 6)),
    "lora_raw": (lambda: nn.Sequential(_RawLora(), nn.GELU(), _RawLora()), _shape(5, 4, 6)),
    "twice": (lambda: Graph(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(6, 6)), _shape(5, 4, 6)),
    "unfolded": (lambda: nn.Sequential(nn.Unfold(2), nn.Linear(9, 3)), _shape(5, 3, 4, 4)),
    "pixel_shuffle": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 2, 2)),
        _shape(5, 3, 3, 3),
    ),
    "head_of_adaptive_pool": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
        _shape(5, 3, 5, 5),
    ),
}

_AUTOCAST = ("linear_3d", "conv2d", "embedding", "layer_norm", "attention", "raw_matrix", "tied", "gru")
_BFLOAT = ("linear_3d", "conv1d", "embedding", "layer_norm", "rms_norm", "tied")
_UNCHECKED = (
    "linear_3d",
    "linear_4d",
    "conv1d_circular",
    "conv1d_grouped",
    "embedding_padding",
    "conv2d_pointwise_strided",
    "layer_norm",
    "layer_norm_eps",
    "tied",
    "tied_linears",
    "twice",
    "folded",
    "tokens_first",
)
# Of each way in which gradients and norms are formed: what other kinds add, float64 and one pass show as well.
_IN_EACH_SETTING = ("linear", "conv1d_grouped", "embedding", "layer_norm", "group_norm", "gru_dp", "raw_matrix", "tied")
_IN_EACH_SETTING += ("tied_large_padding", "tied_transposed_large", "twice", "lora_raw")


def _calm(steps: Steps) -> Steps:
    """Loss scales of one: what is rounded is then as large in every sample."""

    def calm(batch: Batch) -> Batch:
        return {**batch, "scale": torch.ones_like(batch["scale"])}

    return lambda: [Step([calm(b) for b in each.batches], each.change) for each in steps()]


PROGRAMS = [
    *(
        # For some seeds all random numbers of a trial are negative: the layer then looks like a scale.
        Program(
            f"kind_prelu_of_width_{width}",
            lambda width=width: nn.Sequential(nn.Linear(6, width), nn.PReLU(), nn.Linear(width, 3)),
            _shape(4, 6),
            "exact",
            settings={"removes": False},
            seeds=seeds,
        )
        for width, seeds in ((1, (38, 42, 85, 110)), (6, (85, 134, 259)))
    ),
    *(Program(f"kind_{name}", build, steps, "exact") for name, (build, steps) in LAYERS.items()),
    *(
        Program(
            f"kind_{name}_{setting}", build, steps, "exact", settings=settings, nightly=name not in _IN_EACH_SETTING
        )
        for setting, settings in (("fp32", {"dtype": torch.float32}), ("two_passes", {"passes": 2}))
        for name, (build, steps) in LAYERS.items()
    ),
    *(
        Program(f"kind_{name}_mean", *LAYERS[name], "exact", settings={"reduction": "mean"})
        for name in ("linear_3d", "conv2d", "embedding", "gru", "tied")
    ),
    *(
        Program(
            f"kind_{name}_autocast",
            LAYERS[name][0],
            _calm(LAYERS[name][1]),
            "exact",
            settings={"dtype": torch.float32, "autocast": torch.bfloat16},
        )
        for name in _AUTOCAST
    ),
    *(
        Program(
            f"kind_{name}_bf16", LAYERS[name][0], _calm(LAYERS[name][1]), "exact", settings={"dtype": torch.bfloat16}
        )
        for name in _BFLOAT
    ),
    *(
        # What a layer does by itself: the proof would replace rules that are wrong by repeating the layer.
        Program(f"kind_{name}_unchecked", *LAYERS[name], "exact", settings={"module_options": {"check": "off"}})
        for name in _UNCHECKED
    ),
]
