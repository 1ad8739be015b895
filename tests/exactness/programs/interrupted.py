# SPDX-License-Identifier: Apache-2.0
"""Loops that call the model again, or another private one, between a call and its loss, or attack its inputs.

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
                torch.optim.SGD(self.model.parameters(), lr=0.1),
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


def _learns_through_another(weigh: Weigh) -> Body:
    """GAN: the second model tells inputs from the first one's outputs, and learns by steps of its own before."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        second = _second(m, s)
        fake = torch.cat([m(b["x"]), b["x"][:, :2]], 1)
        second.train(_squares(second.module(fake.detach())) - _squares(second.module(b["x"])))
        train(weigh(_squares(second.module(fake))))
        second.module.zero_grad()

    return body


def _loss_before_a_call(weigh: Weigh) -> Body:
    """The loss of the first call is computed before the second one, and runs backward after the second one's."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        losses = weigh(_entropy(m(b["x"]), b))
        train(losses + _squares(m(b["x"] + 1)))

    return body


# --- what backward gives the inputs ---
def _attacked(weigh: Weigh) -> Body:
    """Adversarial training: inputs move by the signs of their gradients, which a backward leaves."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        x = b["x"].clone().requires_grad_()
        _backward(_entropy(m(x), b))
        m.zero_grad()
        train(_entropy(m(_moved(x, x.grad, weigh)), b))

    return body


def _attacked_twice(weigh: Weigh) -> Body:
    """The gradient is that of what is added to the inputs."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        delta = torch.zeros_like(b["x"]).requires_grad_()
        for _ in range(2):
            _backward(_entropy(m(b["x"] + delta), b))
            delta = _moved(delta, delta.grad, weigh).requires_grad_()
        m.zero_grad()
        train(_entropy(m((b["x"] + delta).detach()), b))

    return body


def _attacked_in_evaluation(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        x = (2 * b["x"]).requires_grad_()
        m.eval()
        _backward(_entropy(m(x), b))
        m.train()
        m.zero_grad()
        train(_entropy(m(_moved(x, x.grad, weigh)), b))

    return body


def _attacked_while_frozen(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        x = (2 * b["x"]).requires_grad_()
        m.requires_grad_(False)
        _backward(_entropy(m(x), b))
        m.requires_grad_(True)
        train(_entropy(m(_moved(x, x.grad, weigh)), b))

    return body


def _attacked_beside_a_clean_call(weigh: Weigh) -> Body:
    """Virtual adversarial training: the attacked call is the second one of its loss."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        delta = (0.1 * b["x"]).requires_grad_()
        _backward(_squares(m(b["x"] + delta)))
        m.zero_grad()
        delta = _moved(delta, delta.grad, weigh)
        train(_entropy(m(b["x"]), b) + _squares(m(b["x"] + delta)))

    return body


def _bias_between_calls(weigh: Weigh) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        losses = _entropy(m(b["x"]), b)
        with torch.no_grad():
            getattr(m, "_module", m)[0].bias.add_(losses.mean() if weigh is _weighed else 0.1)
        train(losses + _squares(m(b["x"] + 1)))

    return body


def _backward(losses: torch.Tensor) -> None:
    losses.sum().backward()  # type: ignore[no-untyped-call]


def _moved(x: torch.Tensor, gradient: torch.Tensor | None, weigh: Weigh) -> torch.Tensor:
    assert gradient is not None
    return (x + gradient.sign() * weigh(gradient.norm(dim=1)).unsqueeze(1)).detach()


_ORDERS: dict[str, Callable[[Weigh], Body]] = {
    "call_in_a_mode": _in_a_mode,
    "step_in_a_mode": _whole_step_in_a_mode,
    "two_calls_two_backwards": _two_calls_two_backwards,
    "second_call_of_fewer": _second_call_of_fewer,
    "two_losses_of_a_call": _two_losses_of_a_call,
    "learn_from_one_another": _learn_from_one_another,
    "learn_through_another": _learns_through_another,
    "loss_before_a_call": _loss_before_a_call,
    "attacked": _attacked,
    "attacked_twice": _attacked_twice,
    "attacked_in_evaluation": _attacked_in_evaluation,
    "attacked_while_frozen": _attacked_while_frozen,
    "attacked_beside_a_clean_call": _attacked_beside_a_clean_call,
    "bias_between_calls": _bias_between_calls,
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
            is_right = any(
                each in message for each in ("of one sample each", "left in an earlier step", "between two calls")
            )
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
