# SPDX-License-Identifier: Apache-2.0
"""What begins in a step of which nothing is checked but what every step is.

Hooks on a graph, terms of the loss and other losses, and dispatch modes that a program leaves on.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from opacus_memprof.clipping import GradSampleModuleFlashClip
from tests.exactness.judge import Batch, Verdict
from tests.exactness.program import Program
from tests.exactness.programs.left import _BOUND, Body, Train, _batches, _entropy, _run, _sums_by_hand
from tests.exactness.tensors import norm_of

Change = Callable[[torch.Tensor], torch.Tensor | None]
"""What a hook makes of a gradient; None to leave it."""

_STEPS = 7
"""One more than the first step of which nothing is checked but what every step is."""


class _Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.features: Any = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.features = torch.tanh(self.first(x))
        return self.last(self.features), self.features


class _Hooked(_Features):
    """Adds the hook in its forward, where proofs see it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        h.register_hook(_halved)  # type: ignore[no-untyped-call]
        return self.last(h), h


def _nodes(h: torch.Tensor) -> list[Any]:
    """The nodes of the graph that compute tanh."""
    found, waiting = [], [h.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found += [node] if "Tanh" in node.name() else []
            waiting += [each for each, _ in node.next_functions]
    return found


def _on_attribute(model: Any, outputs: Any, change: Change) -> None:
    getattr(model, "_module", model).features.register_hook(change)


def _on_inner_output(model: Any, outputs: Any, change: Change) -> None:
    outputs[1].register_hook(change)


def _on_output(model: Any, outputs: Any, change: Change) -> None:
    outputs[0].register_hook(change)


def _on_node(model: Any, outputs: Any, change: Change) -> None:
    for node in _nodes(outputs[0]):
        node.register_hook(lambda given, _: tuple(_changed(change, g) for g in given))


def _before_node(model: Any, outputs: Any, change: Change) -> None:
    for node in _nodes(outputs[0]):
        node.register_prehook(lambda given: tuple(_changed(change, g) for g in given))


def _in_place(model: Any, outputs: Any, change: Change) -> None:
    def hook(given: Any, _: Any) -> None:
        for g in given:
            found = change(g)
            if found is not None:
                g.copy_(found)

    for node in _nodes(outputs[0]):
        node.register_hook(hook)


def _changed(change: Change, gradient: torch.Tensor) -> torch.Tensor:
    found = change(gradient)
    return gradient if found is None else found


def _mixed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + gradient.mean(0)


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def _looked_at(gradient: torch.Tensor) -> None:
    gradient.norm()


def _body(add: Callable[[Any, Any, Change], None], change: Change, begins: int) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        outputs = m(b["x"])
        s.calls = getattr(s, "calls", 0) + 1
        if s.calls >= begins:
            add(m, outputs, change)
        train(_entropy(outputs[0], b))

    return body


class _Auxiliary(_Features):
    """Keeps a loss that mixes samples in an attribute, as routers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, features = super().forward(x)
        self.balance = features.softmax(1).mean(0).square().sum()
        return out, features.detach()


class _Once(torch.autograd.Function):
    """Half of the squares, without second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square() / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


def _once(out: torch.Tensor, b: Batch) -> torch.Tensor:
    squares: torch.Tensor = _Once.apply(out)
    return squares.sum(1)


def _with_balance(before: float, begins: int) -> Body:
    """A step with a term from an attribute, of weight 1, that begins; with another weight until then."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        losses = _entropy(m(b["x"])[0], b)
        s.calls = getattr(s, "calls", 0) + 1
        weight = 1.0 if s.calls >= begins else before
        balance = getattr(m, "_module", m).balance / len(losses)
        train(losses if weight < 0 else losses + weight * balance)

    return body


def _of_first_class(out: torch.Tensor, dim: int) -> torch.Tensor:
    return -out.log_softmax(dim)[:, 0]


def _with_loss(
    loss: Callable[[torch.Tensor, Batch], torch.Tensor],
    begins: int,
    first: Callable[[torch.Tensor, Batch], torch.Tensor] = _entropy,
) -> Body:
    """A step with another loss than the first one from one step on."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        out = m(b["x"])[0]
        s.calls = getattr(s, "calls", 0) + 1
        train(loss(out, b) if s.calls >= begins else first(out, b))

    return body


def _spread(out: torch.Tensor) -> torch.Tensor:
    return out.detach().std()


def _with_divisor(divisor: Callable[[torch.Tensor], Any], begins: int) -> Body:
    """A loss whose divisor is computed in each step, and is used from one step on: its graph is always the same."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        out = m(b["x"])[0]
        s.calls = getattr(s, "calls", 0) + 1
        found = divisor(out)
        train(_entropy(out, b) / (found if s.calls >= begins else 1 + 0 * found))

    return body


def _with_spread_in(steps: Collection[int]) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        out = m(b["x"])[0]
        s.calls = getattr(s, "calls", 0) + 1
        train(_entropy(out, b) / (_spread(out) if s.calls in steps else torch.ones(())))

    return body


def _with_another_model(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Another private model is called last, but the divisor is of this one's outputs."""
    out = m(b["x"])[0]
    s.calls = getattr(s, "calls", 0) + 1
    if s.calls == 1:
        s.other = GradSampleModuleFlashClip(_Features().double()) if hasattr(m, "_module") else _Features().double()
    s.other(b["x"])
    train(_entropy(out, b) / (_spread(out) if s.calls >= 10 else torch.ones(())))


def _annealed(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A weight that is another one in each step, and an accuracy that is computed now and then."""
    out = m(b["x"])[0]
    s.calls = getattr(s, "calls", 0) + 1
    if s.calls % 5 == 1:
        s.best = out.argmax(1).eq(b["y"]).double().mean()
    train(_entropy(out, b) + 0.01 * s.calls * out.square().sum(1))


def _of_sequences(out: torch.Tensor, b: Batch) -> torch.Tensor:
    """It has no second derivatives, and torch takes another overload of it while its operations are followed."""
    scores = torch.stack([out, 2 * out, -out]).log_softmax(2)  # [time, samples, classes]
    lengths = torch.full((2, len(out)), 3)
    return functional.ctc_loss(scores, b["y"].clamp(min=1)[:, None], lengths[0], lengths[1] // 3, reduction="none")


def _in_parts(m: Any, b: Batch, train: Train, s: Any) -> None:
    """One backward of the losses of two parts of the batch."""
    half = len(b["x"]) // 2
    parts = [{key: x[place] for key, x in b.items()} for place in (slice(half), slice(half, None))]
    train(torch.cat([_entropy(m(each["x"])[0], each) for each in parts]))


def _in_views(m: Any, b: Batch, train: Train, s: Any) -> None:
    """One backward of the losses of two inputs of each sample, which are in one tensor."""
    views = torch.stack([b["x"], 2 - b["x"]], 1)
    train(_entropy(m(views[:, 0])[0], b) + _entropy(m(views[:, 1])[0], b))


def _with_lengths(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A loss with more terms, and other ones, in each step."""
    losses = _entropy(m(b["x"])[0], b)
    s.calls = getattr(s, "calls", 0) + 1
    for i in range(s.calls):
        losses = losses.tanh() if i % 3 == 2 else losses * 0.9 + losses.square() * 0.1
    train(losses)


def _with_weighted_hook(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A hook on the outputs that is there in all steps, and mixes from one on."""
    outputs = m(b["x"])
    s.calls = getattr(s, "calls", 0) + 1
    weight = 1.0 if s.calls >= _STEPS else 0.0
    outputs[0].register_hook(lambda g: g - weight * g.mean(0))
    train(_entropy(outputs[0], b))


def _plain(m: Any, b: Batch, train: Train, s: Any) -> None:
    train(_entropy(m(b["x"])[0], b))


# --- gradients of an output from which another one is computed ---
def _weighted_by_gradient(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Two uses of the features, one of them with the gradient that reaches them through the other output."""
    out, h = m(b["x"])
    losses = _entropy(out, b)
    (g,) = torch.autograd.grad(losses.sum(), h, retain_graph=True)
    train(losses * (1 + g.square().sum(1)) + (h * g).sum(1) + h.square().sum(1))


def _mixed_by_gradient(m: Any, b: Batch, train: Train, s: Any) -> None:
    out, h = m(b["x"])
    losses = _entropy(out, b)
    (g,) = torch.autograd.grad(losses.sum(), h, retain_graph=True)
    train(losses + (h * g.mean(0)).sum(1))


def _kept_gradient(m: Any, b: Batch, train: Train, s: Any) -> None:
    out, h = m(b["x"])
    h.retain_grad()
    losses = _entropy(out, b)
    losses.sum().backward(inputs=[h], retain_graph=True)
    g, h.grad = h.grad.clone(), None
    train(losses + (h * g).sum(1))
    (g - h.grad).norm()  # the sums' gradient


def _pulled_features(m: Any, b: Batch, train: Train, s: Any) -> None:
    out, h = m(b["x"])
    train(_entropy(out, b) + 1e-4 * (h * h.mean(0).detach()).sum(1))


def _beside_features(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A term that reaches the features beside the outputs."""
    out, h = m(b["x"])
    hidden = getattr(m, "_module", m).hidden
    train(_entropy(out, b) + h.square().sum(1) + hidden.square().sum(1))


class _Hidden(_Features):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, h = super().forward(x)
        self.hidden = h.exp()
        return out, h


# --- saved-tensor hooks ---
_SCALES = [8.0]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return (x * 64).round() / 64 if x.is_floating_point() else x


def _rounded_by_tensor(x: torch.Tensor) -> torch.Tensor:
    return (x / x.abs().max() * 8).round() * x.abs().max() / 8 if x.is_floating_point() else x


def _rounded_by_global(x: torch.Tensor) -> torch.Tensor:
    return (x * _SCALES[0]).round() / _SCALES[0] if x.is_floating_point() else x


def _largest(b: Batch) -> float:
    return float(b["x"].abs().max())


def _saved(pack: Any, begins: int = 1, scale: Any = None) -> Body:
    """The model's call under hooks of the same code in each step, of which `pack` begins late."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        s.calls = getattr(s, "calls", 0) + 1
        if scale is not None:
            _SCALES[0] = scale(b)
        hooked = pack if begins == 1 else lambda x: pack(x) if s.calls >= begins else x
        with torch.autograd.graph.saved_tensors_hooks(hooked, lambda x: x):
            out = m(b["x"])[0]
        train(_entropy(out, b))

    return body


# --- a loss of which a part is added up in float32 ---
def _smoothed(pull: float) -> Body:
    """Label smoothing as in transformers, and a term that pulls outputs to their mean."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        out = m(b["x"])[0]
        smoothed = -out.log_softmax(1).sum(1, dtype=torch.float32)
        losses = 0.9 * _entropy(out, b) + pull * (out * out.mean(0).detach()).sum(1)
        if hasattr(m, "_module"):
            train((losses.sum() + 0.1 * (smoothed.sum() / 4)).view(1))
        else:
            train(losses + 0.1 * (smoothed / 4))

    return body


# --- parts that torch.compile has compiled for other models, without hooks ---
class _Compiled(_Features):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(self.first, backend="eager")  # type: ignore[assignment]


def _beside_another(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Another model of the same class is compiled, too, and gives targets."""
    with torch.no_grad():
        targets = s.teacher(b["x"])[0]
    out = m(b["x"])[0]
    train(_entropy(out, b) + (out - targets).square().sum(1))


# --- modes ---
class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def _entering(kind: Any, leaves: bool) -> Callable[[], nn.Module]:
    class Entering(_Features):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(self.first(x))
            mode = kind()
            mode.__enter__()
            out = self.last(h)
            if leaves:
                mode.__exit__(None, None, None)
            return out, h

    return Entering


def _between_hooks(kind: Any) -> Callable[[], nn.Module]:
    """A mode that hooks enter before the model's forward and leave after it."""

    def build() -> nn.Module:
        model, modes = _Features(), list[Any]()

        def enter(*_: Any) -> None:
            modes.append(kind())
            modes[-1].__enter__()

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(lambda *_: modes.pop().__exit__(None, None, None))
        return model

    return build


def _leave_modes() -> None:
    """Leaves what a model has left on."""
    while modes := _get_current_dispatch_mode_stack():
        modes[-1].__exit__(None, None, None)
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


def _by_hand(body: Body, build: Callable[[], nn.Module], batches: list[Batch], others: int) -> list[Any]:
    found = _sums_by_hand(body, build, batches, others)
    _leave_modes()
    return found


def loop_program(
    name: str, body: Body, build: Callable[[], nn.Module], sentence: str, mixes: bool = False, steps: int = _STEPS
) -> Program:
    """A loop that is refused with a sentence and exact until then, or always exact if there is none.

    Args:
        name: its name.
        body: one step.
        build: builds the model.
        sentence: a part of the refusal.
        mixes: whether a sample of a step changes what others add to the sums of this step or of later ones.
        steps: their number.
    """

    def run(seed: int) -> Verdict:
        batches = (_batches(seed, "") * steps)[:steps]
        moved = max(_moved(body, build, batches, at) for at in range(steps))
        if mixes != (moved > 1e-9):
            return Verdict("crash", moved, f"other samples' sums move by {moved:.3g} C")
        sums: list[list[torch.Tensor]] = []
        message = _run(body, build, batches, sums=sums)
        _leave_modes()
        if torch.Tensor.register_hook.__module__ != "torch._tensor":
            return Verdict("crash", 0.0, "torch.Tensor.register_hook stays replaced")
        pairs = zip(sums, _by_hand(body, build, batches, -1), strict=False)
        error = max((norm_of([x - y for x, y in zip(*e, strict=True)]) for e in pairs), default=0.0)
        if message or error > 1e-6:
            is_right = bool(message and sentence and sentence in message and (mixes or error < 1e-6))
            return Verdict("refused" if is_right else "wrong", error, message)
        return Verdict("exact", error)

    return Program(name, build, list, "refused" if sentence else "exact", run=run)


def _moved(body: Body, build: Callable[[], nn.Module], batches: list[Batch], at: int) -> float:
    """How far the first sample of a step moves the sums of others in any step, in units of C."""
    own = batches[at]
    other = {**own, "x": own["x"].clone()}
    other["x"][0] = 1 - 3 * own["x"][0]
    changed = [*batches[:at], other, *batches[at + 1 :]]
    a, b = (_by_hand(body, build, each, int(own["index"][0])) for each in (batches, changed))
    return max(norm_of([x - y for x, y in zip(*each, strict=True)]) for each in zip(a, b, strict=True)) / _BOUND


def _program(name: str, body: Body, build: Callable[[], nn.Module], sentence: str, mixes: bool = False) -> Program:
    return loop_program(f"graph_{name}", body, build, sentence, mixes)


_INSIDE = {
    "attribute": _on_attribute,
    "inner_output": _on_inner_output,
    "node": _on_node,
    "before_node": _before_node,
    "in_place": _in_place,
}
_SAVED = "saved-tensor hooks around the model change"
_MIXING_LOSSES: dict[str, Callable[[torch.Tensor, Batch], torch.Tensor]] = {
    "centered": lambda out, b: _entropy(out - out.mean(0), b),
    "normalized": lambda out, b: _entropy((out - out.mean(0)) / (out.std(0) + 1e-3), b),
    "contrastive": lambda out, b: -(out @ out.T).log_softmax(1).diagonal(),
    "over_samples": lambda out, _: _of_first_class(out, 0),
    "neighbours": lambda out, b: _entropy(out + out.roll(1, 0), b),
    "root_of_mean": lambda out, b: (out - 1).square().mean().sqrt().expand(len(out)) / len(out),
}
_OTHER_LOSSES: dict[str, Callable[[torch.Tensor, Batch], torch.Tensor]] = {
    "penalty": lambda out, b: _entropy(out, b) + 0.1 * out.square().sum(1),
    "centered_alone": lambda out, b: _entropy(out - out.mean(1, keepdim=True), b),
    "focal": lambda out, b: _entropy(out, b) * (1 - (-_entropy(out, b)).exp()).square(),
    "one_by_one": lambda out, b: torch.stack([row.square().sum() for row in out]),
    "linear": lambda out, b: out.sum(1),
}
_BESIDE = "reaches the model beside its outputs"
_NO_SUM = "is not a sum, or a mean, of terms of one sample each"
_CHANGES = "changes gradients inside of the model"
_STAYS = "leaves it on when it ends"

PROGRAMS = [
    *(_program(f"{n}_mixes_late", _body(a, _mixed, 7), _Features, _CHANGES, True) for n, a in _INSIDE.items()),
    *(_program(f"{n}_halves_late", _body(a, _halved, 7), _Features, _CHANGES) for n, a in _INSIDE.items()),
    *(_program(f"{n}_looked_at", _body(a, _looked_at, 1), _Features, "") for n, a in _INSIDE.items()),
    *(_program(f"output_halves_from_{n}", _body(_on_output, _halved, n), _Features, "") for n in (1, 7)),
    _program("weighted_by_gradient", _weighted_by_gradient, _Features, ""),
    _program("mixed_by_gradient", _mixed_by_gradient, _Features, "not a sum, or a mean", True),
    _program("kept_gradient", _kept_gradient, _Features, ""),
    _program("pulled_features", _pulled_features, _Features, "not a sum, or a mean", True),
    _program("beside_features", _beside_features, _Hidden, "off the one that the outputs of the model explain"),
    _program("rounds_saved", _saved(_rounded), _Features, ""),
    _program("rounds_saved_by_tensor", _saved(_rounded_by_tensor), _Features, _SAVED, True),
    _program("rounds_saved_by_tensor_late", _saved(_rounded_by_tensor, 7), _Features, _SAVED, True),
    _program("rounds_saved_by_batch", _saved(_rounded_by_global, 1, _largest), _Features, _SAVED, True),
    _program("smoothed_in_float32", _smoothed(0.0), _Features, ""),
    _program("smoothed_and_pulled", _smoothed(1e-4), _Features, "not a sum, or a mean", True),
    _program("compiled_part", _plain, _Compiled, ""),
    _program("compiled_part_of_two", _beside_another, _Compiled, ""),
    _program("output_mixes_late", _body(_on_output, _mixed, 7), _Features, _NO_SUM, True),
    _program("output_hook_mixes_late", _with_weighted_hook, _Features, _NO_SUM, True),
    _program("balance_begins", _with_balance(-1.0, 7), _Auxiliary, _BESIDE, True),
    _program("balance_gets_weight", _with_balance(0.0, 7), _Auxiliary, _BESIDE, True),
    _program("balance_has_no_weight", _with_balance(0.0, 8), _Auxiliary, ""),
    *(_program(f"loss_{n}_late", _with_loss(f, 7), _Features, _NO_SUM, True) for n, f in _MIXING_LOSSES.items()),
    *(_program(f"loss_{n}_late", _with_loss(f, 7), _Features, "") for n, f in _OTHER_LOSSES.items()),
    _program(
        "loss_turns_to_samples",
        _with_loss(lambda out, _: _of_first_class(out, 0), 7, lambda out, _: _of_first_class(out, 1)),
        _Features,
        _NO_SUM,
        True,
    ),
    *(  # steps 10 to 15 are checked only if something is new
        loop_program(f"graph_divisor_{name}_late", body, _Features, _NO_SUM, True, steps)
        for name, steps, body in (
            ("operation", 11, _with_spread_in((10, 11))),
            ("again", 14, _with_spread_in((10, 13, 14))),
            ("before_another_model", 11, _with_another_model),
            ("number", 11, _with_divisor(lambda out: float(_spread(out)), 10)),
            ("of_own_function", 11, _with_divisor(lambda out: float(_spread(out)) ** 3 / 7, 10)),
        )
    ),
    loop_program("graph_annealed", _annealed, _Features, "", steps=12),
    _program("parts_in_one_backward", _in_parts, _Features, "other rows of the same tensor"),
    _program("views_in_one_backward", _in_views, _Features, ""),
    _program("loss_of_lengths", _with_lengths, _Features, ""),
    _program("loss_once_late", _with_loss(_once, 7), _Features, "its second derivatives, by which"),
    _program("loss_once", _with_loss(_once, 1), _Features, ""),
    _program("loss_of_sequences", _with_loss(_of_sequences, 1), _Features, ""),
    _program("halves_in_forward", _plain, _Hooked, ""),
    *(_program(f"{k.__name__}_stays", _plain, _entering(k, False), _STAYS) for k in (_Dispatch, _Function)),
    *(_program(f"{k.__name__}_leaves", _plain, _entering(k, True), "") for k in (_Dispatch, _Function)),
    *(_program(f"{k.__name__}_of_hooks", _plain, _between_hooks(k), "") for k in (_Dispatch, _Function)),
]
