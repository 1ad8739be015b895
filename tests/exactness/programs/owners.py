# SPDX-License-Identifier: Apache-2.0
"""Rows that change owners: picked, sorted, packed or routed by the data of each batch."""

from collections.abc import Callable, Sequence
from typing import Any

import opacus.layers
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.exactness.judge import Batch
from tests.exactness.program import Graph, Program, floats, ragged_ids, several

_EQUAL, _RAGGED = (5, 5, 5, 5), (2, 5, 1, 4)


def _with_lengths(lengths: Sequence[int]) -> Batch:
    return floats(len(lengths), 5, 6, lengths=torch.tensor(lengths))


def _with_mask(lengths: Sequence[int]) -> Batch:
    mask = torch.arange(5).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    return floats(len(lengths), 5, 6, mask=mask)


def _values(lengths: Sequence[int]) -> Batch:
    """Inputs whose first feature is positive in as many tokens as there are valid ones."""
    batch = _with_mask(lengths)
    mask = batch.pop("mask")
    batch["x"][..., 0] = batch["x"][..., 0].abs() * torch.where(mask, 1.0, -1.0)
    return batch


_LENGTHS = several(lambda: _with_lengths(_EQUAL), lambda: _with_lengths(_RAGGED), lambda: _with_lengths((1, 1, 5, 3)))
_DESCENDING = several(lambda: _with_lengths(_EQUAL), lambda: _with_lengths((5, 3, 2, 1)))
_MASKS = several(lambda: _with_mask(_EQUAL), lambda: _with_mask(_RAGGED), lambda: _with_mask((1, 1, 5, 3)))
_RAGGED_FIRST = several(lambda: _with_mask(_RAGGED), lambda: _with_mask(_EQUAL))
_IDS = several(lambda: ragged_ids(_EQUAL), lambda: ragged_ids(_RAGGED), lambda: ragged_ids((1, 1, 5, 3)))
_VALUES = several(lambda: _values(_EQUAL), lambda: _values(_RAGGED))


def _layers() -> dict[str, nn.Module]:
    return {"embed": nn.Linear(6, 6), "lin": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 3)}


def _on_rows(model: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    out[mask] = model.lin(h[mask])
    return out


def _masked(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return m.head(_on_rows(m, m.embed(x), mask))


def _masked_by_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.head(_on_rows(m, m.embed(x), x[..., 0] > 0))


def _masked_norm(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    h = m.embed(x)
    out = torch.zeros_like(h)
    out[mask] = m.norm(torch.tanh(m.lin(h[mask])))
    return m.head(out)


def _compressed(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """With nonzero and index_select, back by index_copy."""
    h = m.embed(x)
    rows = mask.flatten().nonzero().flatten()
    picked = m.lin(h.flatten(0, 1).index_select(0, rows))
    return m.head(torch.zeros_like(h).flatten(0, 1).index_copy(0, rows, picked).view_as(h))


def _gathered(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """With gather and scatter."""
    h = m.embed(x)
    rows = mask.flatten().nonzero().flatten().unsqueeze(1).expand(-1, h.shape[-1])
    picked = m.lin(h.flatten(0, 1).gather(0, rows))
    return m.head(torch.zeros_like(h).flatten(0, 1).scatter(0, rows, picked).view_as(h))


def _summed(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One vector for each sample: index_add of what is picked."""
    h = m.embed(x)
    owner = torch.arange(len(x)).unsqueeze(1).expand(-1, x.shape[1])[mask]
    return m.head(torch.zeros(len(x), 6, dtype=h.dtype).index_add(0, owner, m.lin(h[mask])))


def _unpadded(m: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([each[:n] for each, n in zip(m.embed(x), lengths.tolist(), strict=True)])
    parts = m.lin(rows).split(lengths.tolist())
    return m.head(torch.stack([part.sum(0) for part in parts]))


def _varying_loop(m: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """One call of a layer for each sample."""
    return m.head(torch.stack([m.lin(row[:n]).sum(0) for row, n in zip(m.embed(x), lengths.tolist(), strict=True)]))


def _sorted_by(order_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(m: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        order = order_of(x, *others)
        return m.head(m.lin(m.embed(x)[order])[order.argsort()])

    return forward


def _by_list(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(range(len(x)), key=lambda n: -int(lengths[n])))


def _by_sentinel(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0, 0] == 0).long().argsort(stable=True)


def _selected_by_sentinel(m: Any, x: torch.Tensor) -> torch.Tensor:
    order = _by_sentinel(x)
    return m.head(m.lin(m.embed(x).index_select(0, order)).index_select(0, order.argsort()))


def _scattered_by_sentinel(m: Any, x: torch.Tensor) -> torch.Tensor:
    order = _by_sentinel(x)

    def move(h: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(h).scatter(0, places.view(-1, 1, 1).expand_as(h), h)

    return m.head(move(m.lin(move(m.embed(x), order)), order.argsort()))


def _packed_by_sentinel(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = (x[..., 0] != 0).sum(1)
    packed = pack_padded_sequence(m.embed(x), lengths, batch_first=True)
    rows = PackedSequence(m.lin(packed.data), packed.batch_sizes)
    return m.head(pad_packed_sequence(rows, batch_first=True, total_length=x.shape[1])[0])


def _with_sentinels() -> Batch:
    """Values that neither the first batch nor other values for its samples have."""
    batch = floats(4, 5, 6)
    batch["x"][0, 0, 0] = batch["x"][2, 0, 0] = 0
    return batch


def _with_a_short_sample() -> Batch:
    """Values of the same kind. A model that needs its samples sorted by length cannot be proved on others."""
    batch = floats(3, 5, 6)
    batch["x"][2, 1:, 0] = 0
    return batch


def _sorted_ids(m: Any, ids: torch.Tensor) -> torch.Tensor:
    order = (ids != 0).sum(1).argsort(descending=True, stable=True)
    return m.head(m.lin(m.embed(ids)[order])[order.argsort()])


def _ids_without_padding(m: Any, ids: torch.Tensor) -> torch.Tensor:
    mask = ids != 0
    h = torch.zeros(*ids.shape, 6, dtype=m.head.weight.dtype)
    h[mask] = m.lin(m.embed(ids[mask]))
    return m.head(h)


def _distinct(m: Any, ids: torch.Tensor) -> torch.Tensor:
    """Looks each distinct id up once, for all samples."""
    found, where = ids.unique(return_inverse=True)
    return m.head(m.lin(m.embed(found))[where])


def _routed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A mixture of experts: each token goes to one of them."""
    h = m.embed(x).flatten(0, 1)
    weights = m.router(h).softmax(-1)
    chosen = weights.argmax(-1)
    out = torch.zeros_like(h)
    for n, expert in enumerate(m.experts):
        rows = (chosen == n).nonzero().flatten()
        if rows.numel():
            out = out.index_add(0, rows, expert(h[rows]) * weights[rows, n : n + 1])
    return m.head(out.view(*x.shape[:2], -1))


def _experts() -> Graph:
    experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    return Graph(_routed, router=nn.Linear(6, 2), experts=experts, **_layers_of("embed", "head"))


def _routed_by(lengths: Sequence[int]) -> Callable[[], Batch]:
    return lambda: {**_values(lengths), "scale": torch.ones(len(lengths), dtype=torch.float64)}


def _layers_of(*names: str) -> dict[str, nn.Module]:
    return {name: layer for name, layer in _layers().items() if name in names}


def _graph(function: Callable[..., torch.Tensor], *names: str) -> Callable[[], nn.Module]:
    return lambda: Graph(function, **_layers_of(*names))


def _recurrent(cell: Callable[[], nn.Module], is_sorted: bool, pooled: bool) -> Callable[[], nn.Module]:
    def forward(m: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(m.embed(x), lengths, batch_first=True, enforce_sorted=is_sorted)
        out, hidden = m.cell(packed)
        if pooled:
            return m.head(hidden[0][-1] if isinstance(hidden, tuple) else hidden[-1])
        return m.head(pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0])

    return lambda: Graph(forward, embed=nn.Linear(6, 6), cell=cell(), head=nn.Linear(6, 3))


_CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 6, batch_first=True),
    "gru": lambda: nn.GRU(6, 6, batch_first=True),
    "lstm_both_ways": lambda: nn.LSTM(6, 3, batch_first=True, bidirectional=True),
    "dp_lstm": lambda: opacus.layers.DPLSTM(6, 6, batch_first=True),
    "dp_gru": lambda: opacus.layers.DPGRU(6, 6, batch_first=True),
}


def _embedding_layers(*names: str) -> dict[str, nn.Module]:
    return {"embed": nn.Embedding(11, 6, padding_idx=0), **_layers_of(*names)}


PROGRAMS = [
    Program("rows_mask", _graph(_masked, "embed", "lin", "head"), _MASKS, "exact"),
    Program("rows_mask_two_passes", _graph(_masked, "embed", "lin", "head"), _MASKS, "either", settings={"passes": 2}),
    Program("rows_mask_ragged_first", _graph(_masked, "embed", "lin", "head"), _RAGGED_FIRST, "exact"),
    Program("rows_mask_by_value", _graph(_masked_by_value, "embed", "lin", "head"), _VALUES, "exact"),
    Program("rows_mask_norm", _graph(_masked_norm, "embed", "lin", "norm", "head"), _MASKS, "exact"),
    Program("rows_nonzero", _graph(_compressed, "embed", "lin", "head"), _MASKS, "exact"),
    Program("rows_gather", _graph(_gathered, "embed", "lin", "head"), _MASKS, "exact"),
    Program("rows_index_add", _graph(_summed, "embed", "lin", "head"), _MASKS, "exact"),
    Program("rows_cat_split", _graph(_unpadded, "embed", "lin", "head"), _LENGTHS, "either"),
    Program("rows_loop", _graph(_varying_loop, "embed", "lin", "head"), _LENGTHS, "either"),
    Program(
        "rows_sorted_by_length",
        _graph(_sorted_by(lambda x, n: n.argsort(descending=True, stable=True)), "embed", "lin", "head"),
        _LENGTHS,
        "exact",
    ),
    Program("rows_sorted_by_list", _graph(_sorted_by(_by_list), "embed", "lin", "head"), _LENGTHS, "exact"),
    Program(
        "rows_sorted_by_value",
        _graph(_sorted_by(lambda x: x.square().sum((1, 2)).argsort()), "embed", "lin", "head"),
        several(*[lambda: _values(_EQUAL)] * 3),
        "exact",
    ),
    *(
        Program(  # the second forward is checked again, the third is not
            f"rows_{name}_by_sentinel",
            _graph(forward, "embed", "lin", "head"),
            several(*[lambda: floats(4, 5, 6)] * 2, _with_sentinels),
            "exact",
        )
        for name, forward in (
            ("sorted", _sorted_by(_by_sentinel)),
            ("selected", _selected_by_sentinel),
            ("scattered", _scattered_by_sentinel),
        )
    ),
    Program(
        "rows_packed_by_sentinel",
        _graph(_packed_by_sentinel, "embed", "lin", "head"),
        several(_with_a_short_sample),
        "refused",
    ),
    Program("rows_sorted_by_padding", lambda: Graph(_sorted_ids, **_embedding_layers("lin", "head")), _IDS, "exact"),
    Program("rows_ids_masked", lambda: Graph(_ids_without_padding, **_embedding_layers("lin", "head")), _IDS, "exact"),
    Program("rows_distinct_ids", lambda: Graph(_distinct, **_embedding_layers("lin", "head")), _IDS, "either"),
    Program("rows_routed", _experts, several(_routed_by(_EQUAL), _routed_by(_RAGGED)), "exact"),
    *(
        Program(
            f"rows_packed_{name}",
            _recurrent(cell, False, False),
            _LENGTHS,
            "exact",
            nightly=name in ("lstm", "gru"),  # lstm_both_ways goes their way
        )
        for name, cell in _CELLS.items()
    ),
    *(
        Program(
            f"rows_packed_{name}_state", _recurrent(_CELLS[name], False, True), _LENGTHS, "exact", nightly=name == "gru"
        )
        for name in ("lstm", "gru")
    ),
    *(
        Program(
            f"rows_packed_{name}_sorted",
            _recurrent(_CELLS[name], True, False),
            _DESCENDING,
            "exact",
            nightly=name != "dp_lstm",
        )
        for name in ("lstm", "gru", "dp_lstm")
    ),
]
