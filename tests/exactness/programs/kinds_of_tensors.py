# SPDX-License-Identifier: Apache-2.0
"""Losses, and inputs, of tensors that are no plain ones: of the program's own classes, sparse, nested, quantized."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tests.exactness.judge import Batch
from tests.exactness.program import Program, of_shape


class _Own(torch.Tensor):
    """Sees functions, and changes none."""


class _Mixing(torch.Tensor):
    """A class in whose tanh samples mix."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output + output.mean(0) if func is torch.tanh else output


class _Wrapper(torch.Tensor):
    """Runs operations on the tensor that it wraps."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> "_Wrapper":
        found: Any = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)
        found.inner = x
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _Wrapper(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> torch.Tensor:
        return g.inner if isinstance(g, _Wrapper) else g


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return x.inner  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return _Wrapper(g)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def _squares(h: torch.Tensor) -> torch.Tensor:
    return h.square().sum(1)


def _mixed(h: torch.Tensor) -> torch.Tensor:
    return _squares(h - h.mean(0))


def _nested(h: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([row[:3] for row in h.unbind()])
    return torch.softmax(rows, -1).to_padded_tensor(0.0)


def _jagged(h: torch.Tensor) -> torch.Tensor:
    """All rows' numbers, as values of a jagged tensor."""
    offsets = torch.arange(0, h.numel() + 1, h.shape[1])
    return torch.nested.nested_tensor_from_jagged(h.flatten().unsqueeze(1), offsets).sin().values().view_as(h)


def _quantized(h: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(h.detach().float(), 0.1, 0, torch.qint8).dequantize().double()


def _attention(h: torch.Tensor) -> torch.Tensor:
    """Of all samples to all others, with sparse weights."""
    return _squares(torch.sparse.mm((h.detach() @ h.detach().T).to_sparse(), h) / len(h))


def _of_labels(model: Any, batch: Batch) -> torch.Tensor:
    """The mean of labels that are wrapped."""
    return _squares(model(batch["x"]) - _Wrapper(batch["x"][:, :4].clone()).mean(0).inner)


_CLEAN = {
    "own_class": lambda m, b: _plain(_squares(m(b["x"].as_subclass(_Own)))),
    "mixing_class_unused": lambda m, b: _plain(_squares(m(b["x"]).as_subclass(_Mixing) * 2)),
    "wrapper": lambda m, b: _Unwrap.apply(_squares(_Wrap.apply(m(b["x"])))),
    "sparse": lambda m, b: torch.sparse.sum(m(b["x"]).square().to_sparse(), 1).to_dense(),
    "nested": lambda m, b: _squares(_nested(m(b["x"]))),
    "jagged": lambda m, b: _squares(_jagged(m(b["x"]))),
    "quantized": lambda m, b: _squares(m(b["x"]) - _quantized(2 * m(b["x"]))),
}
_MIXING = {
    "own_class": lambda m, b: _plain(_mixed(m(b["x"].as_subclass(_Own)))),
    "mixing_class": lambda m, b: _plain(_squares(torch.tanh(m(b["x"]).as_subclass(_Mixing)))),
    "wrapper": lambda m, b: _Unwrap.apply(_mixed(_Wrap.apply(m(b["x"])))),
    "wrapped_labels": _of_labels,
    "sparse": lambda m, b: _squares((h := m(b["x"])) - torch.sparse.sum(h.to_sparse(), 0).to_dense()),
    "sparse_weights": lambda m, b: _attention(m(b["x"])),
    "nested": lambda m, b: _mixed(_nested(m(b["x"]))),
    "jagged": lambda m, b: _mixed(_jagged(m(b["x"]))),
    "quantized": lambda m, b: _squares((h := m(b["x"])) - _quantized(h).mean(0)),
}


def _program(name: str, allowed: Any, loss: Any) -> Program:
    return Program(
        f"tensors_{name}",
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)),
        of_shape(6, 6, count=3),
        allowed,
        lambda model, batch: loss(model, batch) * batch["scale"],
    )


PROGRAMS = [
    *(_program(f"{name}_clean", "exact", loss) for name, loss in _CLEAN.items()),
    *(_program(f"{name}_mixing", "refused", loss) for name, loss in _MIXING.items()),
]
