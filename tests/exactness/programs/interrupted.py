# SPDX-License-Identifier: Apache-2.0
"""Loops that call the model again, or another private one, between a call and its loss.

Each interruption runs with a loss that mixes samples, which must be refused, and with one that does not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from tests.exactness.judge import Batch, Verdict
from tests.exactness.program import Program
from tests.exactness.programs.left import _BOUND, Body, Train, _batches, _entropy, _model, _run, _squares
from tests.exactness.programs.outside import moved_by_a_sample

Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Makes losses of losses, [B]."""


class _Second:
    """A second model with a training of its own, which is private if the first one is."""

    def __init__(self, first: Any) -> None:
        self.model = _model().double()
        self.module: Any = self.model
        self.optimizer: Any = None
        if isinstance(first, GradSampleModuleFlashClip):
            self.module = GradSampleModuleFlashClip(self.model, loss_reduction="sum", max_grad_norm=_BOUND)
            self.optimizer = DPOptimizerFlashClip(
                torch.optim.SGD(self.model.parameters(), lr=0.0),
                module=self.module,
                noise_multiplier=0.0,
                max_grad_norm=_BOUND,
                expected_batch_size=1,
                loss_reduction="sum",
            )

    def train(self, losses: torch.Tensor) -> None:
        """One step."""
        if self.optimizer is not None:
            losses.sum().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()


def _second(m: Any, s: Any) -> _Second:
    s.last = s.last or _Second(m)
    found: _Second = s.last
    return found


class _Own(TorchDispatchMode):
    """A mode of the program, which counts operations, for example."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


# --- what comes between a call and its loss ---
def _trains_another(m: Any, b: Batch, s: Any) -> None:
    second = _second(m, s)
    second.train(_entropy(second.module(b["x"] + 1), b))


def _trains_another_on_fewer(m: Any, b: Batch, s: Any) -> None:
    second = _second(m, s)
    second.train(_squares(second.module(b["x"][:3])))


def _calls_another(m: Any, b: Batch, s: Any) -> None:
    _second(m, s).module(b["x"])


def _evaluates(m: Any, b: Batch, s: Any) -> None:
    m.eval()
    m(b["x"])
    m.train()


def _looks_at_one_sample(m: Any, b: Batch, s: Any) -> None:
    with torch.no_grad():
        m(b["x"][:1])


def _fails(m: Any, b: Batch, s: Any) -> None:
    try:
        m(b["x"][:, :3])
    except RuntimeError:
        return
    raise AssertionError("the model takes inputs of another width")


_BETWEEN = {
    "trains_another": _trains_another,
    "trains_another_on_fewer": _trains_another_on_fewer,
    "calls_another": _calls_another,
    "evaluates": _evaluates,
    "looks_at_one_sample": _looks_at_one_sample,
    "fails": _fails,
}


def _interrupted(between: Callable[[Any, Batch, Any], None], weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        h = m(b["x"])
        between(m, b, s)
        train(weigh(_entropy(h, b)))

    return body


# --- other orders of calls and losses ---
def _in_a_mode(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        with _Own():
            h = m(b["x"])
        train(weigh(_entropy(h, b)))

    return body


def _whole_step_in_a_mode(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        with _Own():
            train(weigh(_entropy(m(b["x"]), b)))

    return body


def _two_calls_two_backwards(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        first, second = m(b["x"]), m(b["x"] + 1)
        train(_entropy(first, b), weigh(_entropy(second, b)))

    return body


def _second_call_of_fewer(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        first, second = m(b["x"]), m(b["x"][:4] + 1)
        train(weigh(_entropy(first, b)), _squares(second))

    return body


def _two_losses_of_a_call(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        h = m(b["x"])
        train(_squares(h), weigh(_entropy(h, b)))

    return body


def _learn_from_one_another(weigh: Weigh) -> Body:
    """Mutual learning: each of two private models has the other's outputs as targets."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        second = _second(m, s)
        h, other = m(b["x"]), second.module(b["x"])
        train(weigh(_entropy(h, b) + (h - other.detach()).square().sum(1)))
        second.train(_entropy(other, b) + (other - h.detach()).square().sum(1))

    return body


_ORDERS: dict[str, Callable[[Weigh], Body]] = {
    "call_in_a_mode": _in_a_mode,
    "step_in_a_mode": _whole_step_in_a_mode,
    "two_calls_two_backwards": _two_calls_two_backwards,
    "second_call_of_fewer": _second_call_of_fewer,
    "two_losses_of_a_call": _two_losses_of_a_call,
    "learn_from_one_another": _learn_from_one_another,
}


def _weighed(losses: torch.Tensor) -> torch.Tensor:
    return losses / losses.detach().sum()


def _halved(losses: torch.Tensor) -> torch.Tensor:
    return losses / 2


def _program(name: str, body: Body, is_clean: bool) -> Program:
    def run(seed: int) -> Verdict:
        batches = _batches(seed, "")
        moved = moved_by_a_sample(body, batches)
        if is_clean != (moved < 1e-9):
            return Verdict("crash", moved, f"the program moves other samples' sums by {moved:.3g} C")
        message = _run(body, _model, batches)
        if message:
            is_right = "of one sample each" in message or "left in an earlier step" in message
            return Verdict("refused" if is_right else "wrong", moved, message)
        return Verdict("exact" if is_clean else "wrong", moved, f"other samples' sums move by {moved:.3g} C")

    return Program(f"interrupted_{name}", _model, list, "exact" if is_clean else "refused", run=run)


_BODIES: dict[str, Callable[[Weigh], Body]] = {
    **{name: (lambda weigh, each=each: _interrupted(each, weigh)) for name, each in _BETWEEN.items()},
    **_ORDERS,
}
PROGRAMS = [
    *(_program(f"{name}_and_mixes", make(_weighed), False) for name, make in _BODIES.items()),
    *(_program(name, make(_halved), True) for name, make in _BODIES.items()),
]
