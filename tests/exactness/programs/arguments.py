# SPDX-License-Identifier: Apache-2.0
"""Arguments of the model: keywords, nested, shared by all samples, as long as the batch by accident, no tensors."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.exactness.judge import Batch
from tests.exactness.program import Graph, Program, floats, of_shape, per_sample, scales, several

Call = Callable[[Any, torch.Tensor], torch.Tensor]


def _called(call: Call) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda model, batch: per_sample(call(model, batch["x"]), batch)


class _Table(nn.Module):
    """A module that makes its output from its parameter alone, such as a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 6))
        self.register_buffer("places", torch.arange(4))

    def forward(self, scale: float = 1.0) -> torch.Tensor:
        return scale * self.table[self.places]


def _plus_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x) + m.table()))


def _plus_scaled_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x) + m.table(0.5)))


def _pair(forward: Callable[..., Any], **members: Any) -> Callable[[], nn.Module]:
    return lambda: Graph(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 3), **{n: m() for n, m in members.items()})


def _nested(m: Any, inputs: dict[str, Any]) -> Any:
    return {"logits": [m.last(torch.tanh(m.first(inputs["x"][0])) * inputs["others"][1])]}


@dataclass(frozen=True)
class _Graph:
    """A sample's nodes, which of them there are, and what is computed from both."""

    nodes: torch.Tensor
    mask: torch.Tensor
    name: str = "a graph"
    count: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", self.mask.sum(1, keepdim=True))


def _of_graph(m: Any, graph: _Graph) -> torch.Tensor:
    h = torch.tanh(m.first(graph.nodes)) * graph.mask.unsqueeze(-1)
    return m.last(h.sum(1) / graph.count)


def _mixes_graphs(m: Any, graph: _Graph) -> torch.Tensor:
    h = torch.tanh(m.first(graph.nodes)) * graph.mask.unsqueeze(-1)
    return m.last(h.sum(1) / graph.count.sum())


def _of_mapping(m: Any, inputs: UserDict[str, torch.Tensor]) -> torch.Tensor:
    return m.last(torch.tanh(m.first(inputs["x"])) * inputs["gate"])


def _graph(x: torch.Tensor) -> _Graph:
    return _Graph(x, torch.arange(x.shape[1]) <= x[:, :1, 0].abs())


def _attended(m: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    h = m.first(x)
    return m.last(h + functional.scaled_dot_product_attention(h, h, h, attn_mask=mask))


def _cached(m: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
    cache.kept.append(m.first(x))
    h = torch.cat(cache.kept, 1)
    return m.last(h + functional.scaled_dot_product_attention(h, h, h))


def _with_cache(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x, SimpleNamespace(kept=[]))  # type: ignore[no-any-return]


def _with_positions(m: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x) + m.positions(positions)))


def _by_task(m: Any, x: torch.Tensor, task: str = "a", factor: float = 1.0) -> torch.Tensor:
    return m.last(torch.tanh(m.first(x)) * factor) if task == "a" else m.last(m.first(x))


def _by_temperature(m: Any, x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return m.last((m.first(x) / temperature).softmax(-1))


def _mixes_booleans(m: Any, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0) if flags.dtype == torch.bool else h)


def _mixes_columns(m: Any, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0) if flags.dim() == 2 else h)


def _mixes_if(m: Any, x: torch.Tensor, centers: bool) -> torch.Tensor:
    h = m.first(x)
    return m.last(h - h.mean(0) if centers else h)


def _packed(m: Any, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    packed = pack_padded_sequence(m.first(x), lengths, batch_first=True, enforce_sorted=False)
    return m.last(pad_packed_sequence(m.gru(packed)[0], batch_first=True, total_length=x.shape[1])[0])


def _packed_losses(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(batch["x"], batch["lengths"].tolist()), batch)


def _list_of_samples(m: Any, samples: list[torch.Tensor]) -> torch.Tensor:
    return m.last(torch.stack([torch.tanh(m.first(x)).sum(0) for x in samples]))


def _list_losses(model: Any, batch: Batch) -> torch.Tensor:
    return per_sample(model(list(batch["x"])), batch)


def _two_inputs(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return m.last(torch.tanh(m.first(a)) * m.second(b))


def _pairs(m: Any, x: torch.Tensor) -> torch.Tensor:
    """[B, 2, ...] taken as 2 B rows, as for images with two views."""
    h = torch.tanh(m.first(x.flatten(0, 1))).view(*x.shape[:2], -1)
    return m.last(h[:, 0] * h[:, 1])


def _prototypes(m: Any, x: torch.Tensor, examples: torch.Tensor) -> torch.Tensor:
    """Compares each sample with examples, which all samples share."""
    return m.last(torch.tanh(m.first(x)) @ m.first(examples).mT @ m.first(examples))


_X = (5, 4, 6)
_STEPS = of_shape(*_X, count=2)
_SQUARE = of_shape(4, 4, 6, count=2)
_CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
_LENGTHS = several(
    *[
        lambda lengths=lengths: floats(4, 5, 6, lengths=torch.tensor(lengths))
        for lengths in ((5, 5, 5, 5), (2, 5, 1, 4))
    ]
)


def _switching(model: Any, batch: Batch) -> torch.Tensor:
    """Another task for longer sequences."""
    return per_sample(model(batch["x"], task="a" if batch["x"].shape[1] < 5 else "b"), batch)


def _intervals() -> Batch:
    starts = torch.randint(0, 5, (4, 5, 1))
    return {"ids": torch.cat([starts, starts + torch.randint(0, 5, (4, 5, 1))], -1), "scale": scales(4)}


PROGRAMS = [
    Program(
        "arguments_keyword",
        _pair(lambda m, x=None, other=None: m.last(torch.tanh(m.first(x)))),
        _STEPS,
        "exact",
        _called(lambda model, x: model(x=x, other=None)),
    ),
    Program(
        "arguments_nested",
        _pair(_nested),
        _STEPS,
        "exact",
        _called(lambda model, x: model({"x": [x], "others": (None, x.sigmoid())})["logits"][0]),
    ),
    Program("arguments_cache_that_is_written_to", _pair(_cached), _STEPS, "refused", _called(_with_cache)),
    Program("arguments_no_mask", _pair(_attended), _STEPS, "exact", _called(lambda model, x: model(x, mask=None))),
    Program("arguments_causal_mask", _pair(_attended), _STEPS, "exact", _called(lambda model, x: model(x, _CAUSAL))),
    Program(
        "arguments_causal_mask_of_the_batch_s_size",
        _pair(_attended),
        _SQUARE,
        "either",
        _called(lambda model, x: model(x, _CAUSAL)),
    ),
    *(
        Program(
            f"arguments_positions_{name}",
            _pair(_with_positions, positions=lambda: nn.Embedding(9, 6)),
            steps,
            allowed,
            _called(call),
        )
        for name, steps, allowed, call in (
            ("shared", _STEPS, "exact", lambda model, x: model(x, torch.arange(4))),
            ("shared_of_one", _STEPS, "exact", lambda model, x: model(x, torch.arange(4).unsqueeze(0))),
            ("of_the_batch_s_size", _SQUARE, "either", lambda model, x: model(x, torch.arange(4))),
            ("by_sample", _STEPS, "exact", lambda model, x: model(x, torch.arange(4).expand(len(x), -1))),
        )
    ),
    *(
        Program(f"arguments_of_a_module_are_{name}", _pair(forward, table=_Table), _STEPS, "exact")
        for name, forward in (("none", _plus_table), ("a_number", _plus_scaled_table))
    ),
    Program("arguments_text", _pair(_by_task), _STEPS, "exact", _called(lambda model, x: model(x, "b"))),
    Program("arguments_number", _pair(_by_task), _STEPS, "exact", _called(lambda model, x: model(x, factor=3.0))),
    Program(
        "arguments_text_switches",
        _pair(_by_task),
        several(lambda: floats(5, 4, 6), lambda: floats(5, 5, 6), lambda: floats(3, 4, 6)),
        "exact",
        _switching,
    ),
    Program(
        "arguments_scalar_tensor",
        _pair(_by_temperature),
        _STEPS,
        "exact",
        _called(lambda model, x: model(x, torch.tensor(0.7, dtype=x.dtype))),
    ),
    Program(
        "arguments_temperature_of_one",
        _pair(_by_temperature),
        _STEPS,
        "exact",
        _called(lambda model, x: model(x, torch.full((1,), 0.7, dtype=x.dtype))),
    ),
    Program(
        "arguments_lengths_as_list",
        _pair(_packed, gru=lambda: nn.GRU(6, 6, batch_first=True)),
        _LENGTHS,
        "either",
        _packed_losses,
    ),
    *(
        Program(
            f"arguments_{name}",
            _pair(forward),
            several(*[lambda f=f: floats(5, 6, flags=f) for f in (torch.ones(5, dtype=torch.int64), second)]),
            "refused",
        )
        for name, forward, second in (
            ("dtype_mixes", _mixes_booleans, torch.ones(5, dtype=torch.bool)),
            ("dimensions_mix", _mixes_columns, torch.ones(5, 2, dtype=torch.int64)),
        )
    ),
    Program(
        "arguments_flag_mixes",
        _pair(_mixes_if),
        several(lambda: floats(6, 4, 6), lambda: floats(6, 5, 6)),
        "refused",
        _called(lambda model, x: model(x, x.shape[1] == 5)),
    ),
    Program("arguments_list_of_samples", _pair(_list_of_samples), _STEPS, "either", _list_losses),
    Program("arguments_dataclass", _pair(_of_graph), _STEPS, "exact", _called(lambda m, x: m(_graph(x)))),
    Program("arguments_dataclass_mixes", _pair(_mixes_graphs), _STEPS, "refused", _called(lambda m, x: m(_graph(x)))),
    Program(
        "arguments_mapping",
        _pair(_of_mapping),
        _STEPS,
        "exact",
        _called(lambda model, x: model(UserDict(x=x, gate=x.sigmoid()))),
    ),
    Program(
        "arguments_two_inputs",
        _pair(_two_inputs, second=lambda: nn.Linear(6, 6)),
        _STEPS,
        "exact",
        _called(lambda model, x: model(x, x.flip(-1))),
    ),
    Program("arguments_pairs", _pair(_pairs), of_shape(5, 2, 6, count=2), "exact"),
    Program(
        "arguments_prototypes",
        _pair(_prototypes),
        _STEPS,
        "either",
        _called(lambda model, x: model(x, torch.linspace(-1, 1, 18, dtype=x.dtype).view(3, 6))),
    ),
    Program(
        "arguments_prototypes_of_the_batch_s_size",
        _pair(_prototypes),
        of_shape(4, 4, 6, count=2),
        "either",
        _called(lambda model, x: model(x, torch.linspace(-1, 1, 24, dtype=x.dtype).view(4, 6))),
    ),
    Program(
        "arguments_prototypes_from_the_batch",
        _pair(_prototypes),
        of_shape(4, 4, 6, count=2),
        "refused",
        _called(lambda model, x: model(x, x[:, 0])),
    ),
    Program(
        "arguments_written_to",
        _pair(lambda m, x: m.last(torch.tanh(m.first(x.sub_(1).mul_(0.5))))),
        _STEPS,
        "exact",
        _called(lambda model, x: model(x.clone())),
    ),
    Program(
        "arguments_input_that_needs_grad",
        _pair(lambda m, x: m.last(torch.tanh(m.first(x)))),
        _STEPS,
        "exact",
        _called(lambda model, x: model(x.clone().requires_grad_())),
    ),
    Program(
        "arguments_intervals",  # whose ends have an order
        lambda: Graph(
            lambda m, ids: m.last(torch.tanh(m.start(ids[..., 0]) + m.length(ids[..., 1] - ids[..., 0]))),
            start=nn.Embedding(9, 6),
            length=nn.Embedding(5, 6),
            last=nn.Linear(6, 3),
        ),
        several(_intervals, _intervals),
        "exact",
    ),
    *(
        Program(
            f"arguments_nested_tensor_{str(layout).rpartition('.')[2]}",
            lambda: Graph(lambda m, x: torch.stack([m.lin(each).sum(0) for each in x.unbind()]), lin=nn.Linear(6, 3)),
            _STEPS,
            "refused",
            _called(
                lambda model, x, layout=layout: model(  # type: ignore[misc]
                    torch.nested.nested_tensor([x[n, : 1 + n % 4] for n in range(len(x))], layout=layout)
                )
            ),
        )
        for layout in (torch.strided, torch.jagged)
    ),
    *(
        Program(
            f"arguments_state_{name}",
            lambda is_first=is_first: Graph(  # type: ignore[misc]
                lambda m, x, state: m.gru(x, state.transpose(0, 1).contiguous() if is_first else state)[0],
                gru=nn.GRU(6, 3, 2, batch_first=True),
            ),
            _STEPS,
            allowed,
            _called(
                lambda model, x, is_first=is_first: model(  # type: ignore[misc]
                    x, x[:, :2, :3].contiguous() if is_first else x[:, :2, :3].transpose(0, 1).contiguous()
                )
            ),
        )
        for name, is_first, allowed in (
            ("with_samples_first", True, "exact"),
            ("with_samples_second", False, "refused"),
        )
    ),
]
