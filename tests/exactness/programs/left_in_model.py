# SPDX-License-Identifier: Apache-2.0
"""What calls without gradients, the model's own forward, or the loop leave in the model for a later forward."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.exactness.judge import Batch
from tests.exactness.program import Program
from tests.exactness.programs.graph_hooks import loop_program
from tests.exactness.programs.left import Body, Train, _entropy

Make = Callable[[torch.Tensor, torch.Tensor], Any]
"""Makes what is kept of outputs and losses."""


def _inner(m: Any) -> Any:
    return getattr(m, "_module", m)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.kept: Any = None
        self.log: Any = torch.zeros(())
        self.count = 0
        self.named: dict[str, Any] = {}
        self.norm = nn.BatchNorm1d(6, affine=False).eval()
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.zeros(6))


class _Writes(_Base):
    """Without gradients, keeps the means of its features; with gradients, reads them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if torch.is_grad_enabled():
            return self.last(h + self._read())
        mean = h.mean(0)
        self.count += 1
        if self.where == "attribute":
            self.kept = mean
        elif self.where == "buffer":
            self.buffer.copy_(mean)
        elif self.where == "other_buffer":
            self.buffer = mean
        elif self.where == "dictionary":
            self.named["mean"] = mean
        elif self.where == "number":
            self.kept = float(mean.mean())
        else:
            self.log = mean
        return self.last(h)

    def _read(self) -> Any:
        if self.where in ("attribute", "number"):
            return 0 if self.kept is None else self.kept
        if self.where == "dictionary":
            return self.named.get("mean", 0)
        return self.buffer if "buffer" in self.where else self.count


class _Normalizes(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


class _Reads(_Base):
    """Reads what the loop has put into an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h if self.kept is None else h + self.kept)


class _Remembers(_Base):
    """Adds the mean of the features of the call before, and keeps its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        before, self.kept = self.kept, h.detach().mean(0)
        self.count, self.log = self.count + 1, self.kept.norm()
        return self.last(h if before is None else h + before)


class _RemembersDeeply(_Base):
    """Does so in an object that is too deep inside of others for a situation."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = SimpleNamespace()
        self.place = self.deep
        for _ in range(5):
            self.place.inner = SimpleNamespace()
            self.place = self.place.inner
        del self.place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self.deep.inner.inner.inner.inner.inner
        h = torch.tanh(self.first(x))
        before, place.kept = getattr(place, "kept", None), h.detach().mean(0)
        return self.last(h if before is None else h + before)


class _Recurs(_Base):
    """Keeps a hidden state of each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x) + (torch.zeros_like(x) if self.kept is None else self.kept))
        self.kept = h.detach()
        return self.last(h)


# --- calls without gradients ---
def _before(m: Any, b: Batch, train: Train, s: Any) -> None:
    with torch.no_grad():
        m(b["x"])
    train(_entropy(m(b["x"]), b))


def _after(m: Any, b: Batch, train: Train, s: Any) -> None:
    train(_entropy(m(b["x"]), b))
    with torch.no_grad():
        m(b["x"])


def _adapts(of_part: bool) -> Body:
    """Statistics of a frozen BatchNorm are those of the batch."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        model = _inner(m)
        model.norm.train()
        with torch.no_grad():
            model.norm(torch.tanh(model.first(b["x"]))) if of_part else m(b["x"])
        model.norm.eval()
        train(_entropy(m(b["x"]), b))

    return body


def _trains_another(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Another model with BatchNorm computes from the outputs: its statistics are those of its own calls alone."""
    if s.last is None:
        s.last = nn.BatchNorm1d(4).double().train()
    h = m(b["x"])
    before = s.last.running_mean.clone()
    s.last(h.detach())
    expected = 0.9 * before + 0.1 * h.detach().mean(0)
    assert torch.allclose(s.last.running_mean, expected), "a check has changed the statistics of another model"
    train(_entropy(h, b))


# --- what the loop puts into the model ---
def _holds(make: Make) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        h = m(b["x"])
        losses = _entropy(h, b)
        kept = make(h.detach(), losses.detach())
        train(losses)
        _inner(m).kept = kept

    return body


def _logs(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses)
    _inner(m).log = losses.detach().mean()


def _counts_in_a_hook(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A hook of the program adds a tensor, into which the loop writes the mean of the losses."""
    if s.last is None:
        s.last = torch.zeros(6, dtype=torch.float64)
        _inner(m).first.register_forward_hook(lambda _, given, out: out + s.last)
    losses = _entropy(m(b["x"]), b)
    train(losses)
    s.last += losses.detach().mean()


# --- what the program empties ---
def _emptied(times: int) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        if s.at < times:
            _inner(m).kept = None
        s.at += 1
        train(_entropy(m(b["x"]), b))

    return body


def _emptied_deeply(times: int) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        if s.at < times:
            _inner(m).deep.inner.inner.inner.inner.inner.kept = None
        s.at += 1
        train(_entropy(m(b["x"]), b))

    return body


def _emptied_after(m: Any, b: Batch, train: Train, s: Any) -> None:
    train(_entropy(m(b["x"]), b))
    _inner(m).kept = None


def _emptied_for_each_size(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Each size of a batch is a situation of its own."""
    size = (6, 4, 6, 2, 5)[s.at]
    s.at += 1
    _inner(m).kept = None
    train(_entropy(m(b["x"][:size]), {key: x[:size] for key, x in b.items()}))


_LEFT, _READ, _KEEPS = "a call without gradients has computed", "earlier calls have computed", "keeps data of a batch"
_PLACES = ("attribute", "buffer", "other_buffer", "dictionary", "number")
_HELD: dict[str, Make] = {
    "mean": lambda h, losses: h.mean() * torch.ones(6, dtype=h.dtype),
    "loss": lambda h, losses: losses.mean(),
    "wider": lambda h, losses: h.mean() * torch.ones(1, 6, dtype=h.dtype),
    "number": lambda h, losses: float(losses.mean()),
}
_CONSTANT: dict[str, Make] = {
    "size": lambda h, losses: 0.1 * len(h) * torch.ones(6, dtype=h.dtype),
    "zero": lambda h, losses: torch.zeros_like(h.mean()),
    "own_number": lambda h, losses: 0.123456789,
}


def _writes(where: str) -> Callable[[], nn.Module]:
    return lambda: _Writes(where)


PROGRAMS: list[Program] = [
    *(loop_program(f"left_before_in_{w}", _before, _writes(w), _LEFT, True, 3) for w in _PLACES),
    *(loop_program(f"left_after_in_{w}", _after, _writes(w), _LEFT, True, 3) for w in _PLACES),
    loop_program("left_before_in_log", _before, _writes("log"), "", steps=3),
    loop_program("left_after_in_log", _after, _writes("log"), "", steps=3),
    loop_program("left_statistics", _adapts(False), _Normalizes, _LEFT, True, 3),
    loop_program("left_statistics_of_part", _adapts(True), _Normalizes, "between two calls", True, 3),
    loop_program("left_statistics_of_another", _trains_another, _Reads, "", steps=3),
    *(loop_program(f"left_held_{n}", _holds(make), _Reads, _READ, True, 3) for n, make in _HELD.items()),
    *(loop_program(f"left_held_{n}", _holds(make), _Reads, "", steps=3) for n, make in _CONSTANT.items()),
    loop_program("left_logged", _logs, _Reads, "", steps=3),
    loop_program("left_in_a_hook", _counts_in_a_hook, _Reads, _READ, True, 3),
    *(loop_program(f"left_emptied_{n}", _emptied(9), m, "") for n, m in (("mean", _Remembers), ("state", _Recurs))),
    loop_program("left_emptied_after", _emptied_after, _Remembers, ""),
    loop_program("left_emptied_for_each_size", _emptied_for_each_size, _Remembers, "", steps=5),
    loop_program("left_emptied_twice", _emptied(2), _Remembers, _KEEPS, True),
    loop_program("left_emptied_deeply", _emptied_deeply(9), _RemembersDeeply, ""),
    loop_program("left_emptied_deeply_twice", _emptied_deeply(2), _RemembersDeeply, "unless the program sets", True),
    loop_program("left_not_emptied", _emptied(0), _Remembers, _KEEPS, True),
]
