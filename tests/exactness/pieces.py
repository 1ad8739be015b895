# SPDX-License-Identifier: Apache-2.0
"""Pieces that drawn models are made of: modules that map [B, T, 6], and a mask of valid tokens, to [B, T, 6]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.exactness.program import Graph
from tests.exactness.programs.mixing import MIXES
from tests.exactness.programs.user_code import ClampingLinear, GatedRMSNorm, QuantizedLinear, ScaledLinear

WIDTH = 6
Piece = Callable[[], nn.Module]


def _plain(layer: Callable[[], nn.Module]) -> Piece:
    return lambda: Graph(lambda m, h, mask: m.layer(h), layer=layer())


def _of(function: Callable[..., torch.Tensor], **layers: Callable[[], Any]) -> Piece:
    return lambda: Graph(function, **{name: make() for name, make in layers.items()})


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _vector() -> nn.Parameter:
    return nn.Parameter(1 + 0.1 * torch.randn(WIDTH))


def _with_heads(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in m.qkv(h).chunk(3, -1))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=_keys(mask))
    return m.out(out.transpose(1, 2).flatten(-2))


def _keys(mask: torch.Tensor) -> torch.Tensor:
    """Each token may look at valid ones, and at itself."""
    return mask[:, None, None, :] | torch.eye(mask.shape[1], dtype=torch.bool)


def _convolved(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return m.conv(h.transpose(1, 2)).transpose(1, 2)


def _over_tokens(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Subtracts each sample's own mean."""
    share = mask.unsqueeze(-1).to(h.dtype)
    return m.lin(h - (h * share).sum(1, keepdim=True) / share.sum(1, keepdim=True).clamp(min=1))


def _looped(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    state = torch.zeros_like(h[:, 0])
    states = []
    for t in range(h.shape[1]):
        state = torch.tanh(m.a(h[:, t]) + m.b(state))
        states.append(state)
    return torch.stack(states, 1)


def _low_rank(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return m.base(h) + m.up(m.down(h))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


CLEAN: dict[str, Piece] = {
    "linear": _plain(_linear),
    "linear_without_bias": _plain(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "mlp": _plain(_mlp),
    "layer_norm": _plain(lambda: nn.LayerNorm(WIDTH)),
    "rms_norm": _plain(lambda: nn.RMSNorm(WIDTH)),
    "activation": _plain(nn.Tanh),
    "prelu": _plain(nn.PReLU),
    "conv": _of(_convolved, conv=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "conv_grouped": _of(_convolved, conv=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=3)),
    "group_norm": _of(_convolved, conv=lambda: nn.GroupNorm(2, WIDTH)),
    "heads": _of(_with_heads, qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH), out=_linear),
    "over_tokens": _of(_over_tokens, lin=_linear),
    "looped": _of(_looped, a=_linear, b=_linear),
    "gru": _of(lambda m, h, mask: m.gru(h)[0], gru=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "low_rank": _of(
        _low_rank,
        base=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        down=lambda: nn.Linear(WIDTH, 2, bias=False),
        up=lambda: nn.Linear(2, WIDTH, bias=False),
    ),
    "raw_scale": _of(lambda m, h, mask: m.w * h, w=_vector),
    "raw_matrix": _of(lambda m, h, mask: h @ m.w, w=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH))),
    "layer_scale": _of(lambda m, h, mask: h + m.w * m.lin(h), w=_vector, lin=_linear),
    "twice": _of(lambda m, h, mask: m.lin(torch.tanh(m.lin(h))), lin=_linear),
    "gated_units": _of(lambda m, h, mask: m.a(h) * m.b(h).sigmoid(), a=_linear, b=_linear),
    "fourier": _of(lambda m, h, mask: torch.fft.fft(m.lin(h), dim=1).real, lin=_linear),
    "checkpointed": _of(lambda m, h, mask: checkpoint(m.mlp, h, use_reentrant=False), mlp=_mlp),
}


def _on_rows(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    out[mask] = m.lin(h[mask])
    return out


def _sorted(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    order = mask.sum(1).argsort(descending=True, stable=True)
    return m.lin(h[order])[order.argsort()]


def _packed(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    packed = pack_padded_sequence(h, mask.sum(1), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.gru(packed)[0], batch_first=True, total_length=h.shape[1])[0]


def _unpadded(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = mask.flatten().nonzero().flatten()
    picked = torch.tanh(m.norm(m.lin(h.flatten(0, 1)[rows])))
    return torch.zeros_like(h).flatten(0, 1).index_add(0, rows, picked).view_as(h)


def _hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, output: output * args[0].sigmoid())
    return layer


def _replaced() -> nn.Module:
    layer: Any = nn.Linear(WIDTH, WIDTH)
    original = layer.forward
    layer.forward = lambda x: 2 * original(x.clamp(-1, 1))
    return layer


HARD: dict[str, Piece] = {
    "on_rows": _of(_on_rows, lin=_linear),
    "sorted_by_length": _of(_sorted, lin=_linear),
    "packed": _of(_packed, gru=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "unpadded": _of(_unpadded, lin=_linear, norm=lambda: nn.LayerNorm(WIDTH)),
    "gated_norm": _of(lambda m, h, mask: m.norm(h, m.gate(h)), norm=GatedRMSNorm, gate=_linear),
    "scaled_linear": _of(lambda m, h, mask: m.lin(h, scale=h.sigmoid()), lin=lambda: ScaledLinear(WIDTH, WIDTH)),
    "clamping": _plain(lambda: ClampingLinear(WIDTH, WIDTH)),
    "quantized": _plain(lambda: QuantizedLinear(WIDTH, WIDTH)),
    "hooked": _plain(_hooked),
    "replaced": _plain(_replaced),
    "checkpointed_raw": _of(lambda m, h, mask: m.w * checkpoint(m.mlp, h, use_reentrant=False), mlp=_mlp, w=_vector),
}

# These mix in some batches only, or too little to measure.
_HIDDEN = (
    "number_of_samples",
    "if_any",
    "capacity",
    "scale_in_backward",
    "norm_of_the_batch",
    "weakly_1e-9",
    "from_size_9",
)
MIXING: dict[str, Piece] = {
    name: _of(lambda m, h, mask, mix=mix: mix(m.lin(h)), lin=_linear)
    for name, mix in MIXES.items()
    if name not in (*_HIDDEN, "attention", "neighbour_4")
}
assert not MIXING.keys() & HARD.keys()  # a program names its pieces


class Drawn(nn.Module):
    """A chain of pieces, some of which have a connection around them."""

    def __init__(self, pieces: list[nn.Module], skips: list[bool], shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pieces = nn.ModuleList(pieces + (pieces[:1] if shared else []))
        self.skips = [*skips, False][: len(self.pieces)]
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for piece, skip in zip(self.pieces, self.skips, strict=True):
            h = h + piece(h, mask) if skip else piece(h, mask)
        out: torch.Tensor = self.last(h)
        return out
