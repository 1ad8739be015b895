# SPDX-License-Identifier: Apache-2.0
"""Training loops that keep something of a step for the next one: of other samples, of the same one, or for printing.

The oracle knows nothing of flash_clip: it runs the loop with a plain model, changes one sample of the first step, and
clips the other samples' gradients of later steps by hand, with the same parameters.
"""

import copy
import math
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.errors import MemprofError
from tests.exactness.judge import Batch, Verdict
from tests.exactness.program import Graph, Program
from tests.exactness.tensors import gradient_of, norm_of, seed_all

Train = Callable[..., Any]
"""Called with the losses, [B], of one backward or of several: backward and step."""
Body = Callable[[Any, Batch, Train, Any], None]
"""One step of a loop: called with the model, the batch, what trains, and the loop's own state."""

_SIZE = 6
_BOUND = 5.0


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


def _squares(h: torch.Tensor) -> torch.Tensor:
    return h.square().sum(1)


def _entropy(h: torch.Tensor, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(h, batch["y"], reduction="none")


def _contrast(h: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(h @ others.T, 1)


def _state(model: nn.Module) -> Any:
    """What loops keep, each in the places that it needs."""
    s, like = SimpleNamespace(), {"dtype": torch.float64}
    s.center, s.queue, s.bank = torch.zeros(4, **like), torch.ones(12, 4, **like), torch.zeros(40, 4, **like)
    s.protos, s.loss, s.ema, s.at, s.numbers = torch.ones(4, 4, **like), torch.ones((), **like), None, 0, []
    s.teacher, s.last = copy.deepcopy(model).requires_grad_(False), None
    return s


# --- what other samples leave ---
def _queue(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = _squares(h) + _contrast(h, s.queue.clone())
    s.queue[s.at : s.at + _SIZE] = h.detach()
    s.at = (s.at + _SIZE) % 12
    train(losses)


def _queue_after(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_contrast(h, s.queue))
    s.queue = torch.cat([s.queue[_SIZE:], functional.normalize(h.detach(), dim=1)])


def _deque(m: Any, b: Batch, train: Train, s: Any) -> None:
    s.last = s.last or deque(maxlen=2)
    h = m(b["x"])
    losses = _squares(h) + (_contrast(h, torch.cat(list(s.last))) if s.last else 0)
    train(losses)
    s.last.append(h.detach())


def _center(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    target = (h.detach() - s.center).softmax(1)
    s.center = 0.9 * s.center + 0.1 * h.detach().mean(0)
    train(-(target * h.log_softmax(1)).sum(1))


def _teacher(m: Any, b: Batch, train: Train, s: Any) -> None:
    """DINO: the teacher is called first, and its outputs move the center after the step."""
    with torch.no_grad():
        target = s.teacher(b["x"] + 0.1)
    h = m(b["x"])
    train(-((target - s.center).softmax(1) * h.log_softmax(1)).sum(1))
    s.center = 0.9 * s.center + 0.1 * target.mean(0)


def _by_mean_loss(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses / s.loss)
    s.loss = 0.9 * s.loss + 0.1 * losses.detach().mean()


def _by_mean_number(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses / (s.ema or 1.0))
    value = losses.mean().item()
    s.ema = value if s.ema is None else 0.9 * s.ema + 0.1 * value


def _by_moving_number(m: Any, b: Batch, train: Train, s: Any) -> None:
    s.ema = s.ema or 1.0
    losses = _entropy(m(b["x"]), b)
    s.ema = 0.99 * s.ema + 0.01 * float(losses.detach().max())
    train(losses * torch.tensor(s.numbers[-1] if s.numbers else 1.0, dtype=torch.float64))
    s.numbers.append(s.ema)


def _above_threshold(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses.clamp(max=s.ema) if s.ema else losses)
    s.ema = losses.mean().item()


def _bank(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = _squares(h) + _contrast(h, s.bank)
    train(losses)
    s.bank[b["index"]] = h.detach()


def _rows_before(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    target = torch.zeros_like(h) if s.last is None else s.last
    train((h - target).square().sum(1))
    s.last = h.detach()


def _prototypes(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train((h - s.protos[b["y"]]).square().sum(1))
    for row, y in zip(h.detach(), b["y"].tolist(), strict=True):
        s.protos[y] = 0.5 * s.protos[y] + 0.5 * row


def _class_means(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = (h - s.protos[b["y"]]).square().sum(1)
    counts = torch.bincount(b["y"], minlength=4).clamp(min=1).to(h.dtype)
    s.protos = torch.zeros_like(s.protos).index_add(0, b["y"], h.detach()) / counts.unsqueeze(1)
    train(losses)


def _codebook(m: Any, b: Batch, train: Train, s: Any) -> None:
    """VQ-VAE: the codes move to the outputs that chose them."""
    h = m(b["x"])
    codes = torch.cdist(h.detach(), s.protos + torch.arange(4).unsqueeze(1) / 9).argmin(1)
    losses = (h - s.protos[codes]).square().sum(1)
    s.protos.index_add_(0, codes, 0.1 * h.detach())
    train(losses)


def _class_weights(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses * s.protos[b["y"], 0])
    s.protos[b["y"], 0] = losses.detach()


def _spread(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_squares(h / s.loss))
    s.loss.mul_(0.5).add_(h.detach().std(), alpha=0.5)


def _covariance(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = (h @ s.protos.clone() * h).sum(1)
    s.protos.lerp_(h.detach().T @ h.detach(), 0.1)
    train(losses)


def _baseline(m: Any, b: Batch, train: Train, s: Any) -> None:
    """REINFORCE: the reward less the mean reward of earlier batches."""
    chances = m(b["x"]).log_softmax(1)
    reward = chances.detach().exp()[:, 0]
    train(-(reward - s.loss) * chances[:, 0])
    s.loss.copy_(reward.mean())


def _gradients(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = _squares(h - s.center)
    (g,) = torch.autograd.grad(losses.sum(), h, retain_graph=True)
    train(losses)
    s.center = 0.1 * g.mean(0)


def _into_buffer(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_squares(h))
    with torch.no_grad():
        getattr(m, "_module", m).shift.copy_(h.mean())


def _into_parameter(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_squares(h))
    with torch.no_grad():
        getattr(m, "_module", m)[0].bias.add_(0.01 * h.mean())


def _into_input(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"] - s.loss)
    train(_squares(h))
    s.loss = h.detach().mean()


def _as_argument(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"], s.ema or 1.0)
    train(_squares(h))
    s.ema = h.square().mean().item()


def _inputs(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = _squares(h) + _contrast(h, s.queue.clone())
    s.queue[s.at : s.at + _SIZE] = b["x"][:, :4]
    s.at = (s.at + _SIZE) % 12
    train(losses)


def _in_two_passes(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Another view of the batch, and its features are the negatives of the next."""
    h, keys = m(b["x"]), m(b["x"] + 0.1)
    losses = _squares(h - keys) + _contrast(h, s.queue)
    train(losses)
    s.queue = keys.detach().clone()


def _after_evaluation(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_squares(h - s.center))
    m.eval()
    with torch.no_grad():
        m(b["x"][:2])
    m.train()
    s.center = h.detach().mean(0)


def _into_gradients_of_inputs(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Each batch moves by the gradients of the one before, row by row."""
    x = (b["x"] + (0 if s.last is None else s.last.sign())).requires_grad_()
    train(_entropy(m(x), b))
    s.last = _gradients_of_inputs(m, x, b)


def _gradients_of_inputs(m: Any, x: torch.Tensor, b: Batch) -> torch.Tensor:
    """The same as `train` leaves under flash_clip."""
    if x.grad is None:
        _entropy(m(x), b).sum().backward()
    assert x.grad is not None
    return x.grad


def _public_head(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A head learns beside the private model, from the same samples, and is not private."""
    s.last = s.last or _Beside(nn.Linear(4, 40))
    losses = _entropy(s.last.module(m(b["x"])), b)
    s.last.learns(train, losses)


def _learned_centers(m: Any, b: Batch, train: Train, s: Any) -> None:
    s.last = s.last or _Beside(nn.Embedding(40, 4))
    losses = (m(b["x"]) - s.last.module(b["y"])).square().sum(1)
    s.last.learns(train, losses)


class _Beside:
    """A module with an optimizer of its own, which is not private."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.double()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def learns(self, train: Train, losses: torch.Tensor) -> None:
        """One step, for which the private model's backward gives the gradients, if it runs one."""
        train(losses)
        if all(p.grad is None for p in self.module.parameters()):
            losses.sum().backward()  # type: ignore[no-untyped-call]
        self.steps()

    def steps(self) -> None:
        """Updates the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()


LEAVES: dict[str, Body] = {
    "queue": _queue,
    "queue_after_the_step": _queue_after,
    "deque_of_outputs": _deque,
    "center": _center,
    "center_of_a_teacher": _teacher,
    "mean_loss": _by_mean_loss,
    "mean_loss_as_a_number": _by_mean_number,
    "moving_number": _by_moving_number,
    "threshold": _above_threshold,
    "bank": _bank,
    "rows_of_the_step_before": _rows_before,
    "prototypes": _prototypes,
    "class_means": _class_means,
    "codebook": _codebook,
    "weights_of_classes": _class_weights,
    "spread": _spread,
    "covariance": _covariance,
    "baseline": _baseline,
    "gradients_of_outputs": _gradients,
    "buffer": _into_buffer,
    "parameter": _into_parameter,
    "input": _into_input,
    "argument": _as_argument,
    "inputs": _inputs,
    "second_view": _in_two_passes,
    "after_evaluation": _after_evaluation,
    "gradients_of_inputs": _into_gradients_of_inputs,
    "public_head": _public_head,
    "learned_centers": _learned_centers,
}
_MODELS = {
    "buffer": lambda: _with_shift(),
    "argument": lambda: Graph(lambda m, x, scale: m.a(x) * scale, a=nn.Linear(6, 4)),
}


def _with_shift() -> nn.Module:
    model = Graph(lambda m, x: m.a(x - m.shift), a=nn.Linear(6, 4))
    model.register_buffer("shift", torch.zeros(()))
    return model


# --- what is printed, belongs to the same sample, or comes from parameters and data ---
def _printed(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    losses = _entropy(h, b)
    s.loss = 0.9 * s.loss + 0.1 * losses.detach().mean()
    train(losses)
    s.ema = 0.9 * (s.ema or 0.0) + 0.1 * losses.mean().item()
    s.numbers.append(f"{s.ema:.4f} {float(s.loss):.4f} {losses.max().item()}")


def _metrics(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Accuracy and confusion matrix."""
    h = m(b["x"])
    train(_entropy(h, b))
    predicted = h.argmax(1)
    s.at += int((predicted == b["y"]).sum())
    s.protos.index_put_((b["y"], predicted), torch.ones(len(h), dtype=h.dtype), accumulate=True)
    s.ema = s.at / 6 + s.protos.trace().item()


def _collected(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Scores and labels of an epoch, for a curve."""
    h = m(b["x"])
    s.numbers.append((h.detach().softmax(1), b["y"]))
    train(_entropy(h, b))
    scores = torch.cat([each for each, _ in s.numbers])
    s.ema = (scores.argmax(1) == torch.cat([y for _, y in s.numbers])).double().mean().item()


def _averaged_weights(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A teacher of averaged weights, whose outputs are targets."""
    own = getattr(m, "_module", m)
    h = m(b["x"])
    with torch.no_grad():
        target = s.teacher(b["x"])
    train((h - target - 1).square().sum(1))
    with torch.no_grad():
        for mean, p in zip(s.teacher.parameters(), own.parameters(), strict=True):
            mean.mul_(0.9).add_(p, alpha=0.1)


def _own_bank(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Temporal ensembling: the target of a sample is what the model made of it in the last epoch."""
    h = m(b["x"])
    losses = (h - s.bank[b["index"]]).square().sum(1)
    train(losses)
    s.bank[b["index"]] = 0.5 * s.bank[b["index"]] + 0.5 * h.detach()


def _own_weights(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses * (1 + s.bank[b["index"], 0]))
    s.bank[b["index"], 0] = losses.detach()


def _scheduled(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A temperature and a weight that change by the step, beside losses that are read."""
    s.at += 1
    temperature = 0.5 + 0.5 * math.cos(s.at / 7)
    h = m(b["x"])
    losses = _entropy(h / temperature, b) + math.exp(-s.at / 3) * _squares(h)
    train(losses)
    s.numbers.append(losses.mean().item())
    s.numbers.append(losses.max().item())


def _best(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses)
    if losses.mean() < (s.ema or math.inf):
        s.ema = losses.detach().mean()
        s.last = copy.deepcopy(m.state_dict())
    s.numbers = losses.tolist()


def _evaluated(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses)
    m.eval()
    with torch.no_grad():
        s.ema = _entropy(m(b["x"]), b).mean().item()
    m.train()


def _static(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Every batch is read into the same tensors."""
    if s.last is None:
        s.last = {key: value.clone() for key, value in b.items()}
    for key, value in b.items():
        s.last[key].copy_(value)
    train(_entropy(m(s.last["x"]), s.last))


def _noisy(m: Any, b: Batch, train: Train, s: Any) -> None:
    s.at += 1
    train(_entropy(m(b["x"] + 0.1 * s.at), b) + (m(b["x"]) - b["x"][:, :4]).square().sum(1))


def _meter(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A module that adds up what it is given, reset in each step."""
    if s.last is None:
        s.last = nn.Module()
        s.last.register_buffer("total", torch.zeros(4, dtype=torch.float64))
    s.last.total.zero_()
    h = m(b["x"])
    train(_squares(h - 1))
    s.last.total += h.detach().sum(0)


def _normalized_data(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Public statistics, and a table of the labels' names."""
    h = m((b["x"] - 0.3) / 1.7)
    train(_entropy(h + s.center, b) + (h - s.protos[b["y"]]).square().sum(1))
    s.numbers.append(h.detach().norm())


def _plateau(m: Any, b: Batch, train: Train, s: Any) -> None:
    if s.last is None:
        s.last = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], 0.1), patience=0)
    losses = _entropy(m(b["x"]), b)
    train(losses)
    s.last.step(losses.detach().mean())


def _gathered_statistics(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_squares(h))
    s.center = 0.9 * s.center + 0.1 * h.detach().mean(0)
    s.protos.add_(h.detach().T @ h.detach())
    s.numbers.append(torch.histc(h.detach(), 4))


def _unused_difference(m: Any, b: Batch, train: Train, s: Any) -> None:
    """The center moves the loss, and no gradient."""
    h = m(b["x"])
    train(_squares(h) + s.center.sum())
    s.center = h.detach().mean(0)


def _noise(s: Any) -> torch.Tensor:
    s.at += 1
    return torch.randn(_SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(s.at))


def _generator(m: Any, b: Batch, train: Train, s: Any) -> None:
    """GAN: the generator learns through the private model, from noise alone."""
    s.last = s.last or _Beside(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 6)))
    fake = s.last.module(_noise(s))
    train(functional.softplus(-m(b["x"])[:, 0]) + functional.softplus(m(fake.detach())[:, 0]))
    functional.softplus(-m(fake)[:, 0]).mean().backward()
    s.last.steps()
    m.zero_grad()


def _small_generator(m: Any, b: Batch, train: Train, s: Any) -> None:
    s.last = s.last or _Beside(nn.Linear(3, 6))
    _generator(m, b, train, s)


def _generator_of_a_frozen_critic(m: Any, b: Batch, train: Train, s: Any) -> None:
    """WGAN: the critic is frozen while the generator learns."""
    s.last = s.last or _Beside(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 6)))
    for _ in range(2):
        fake = s.last.module(_noise(s)).detach()
        train(m(fake)[:, 0] - m(b["x"])[:, 0])
    m.requires_grad_(False)
    (-m(s.last.module(_noise(s)))[:, 0].mean()).backward()
    m.requires_grad_(True)
    s.last.steps()


CLEAN: dict[str, Body] = {
    "printed_losses": _printed,
    "metrics": _metrics,
    "collected_scores": _collected,
    "averaged_weights": _averaged_weights,
    "own_bank": _own_bank,
    "own_weights": _own_weights,
    "schedules": _scheduled,
    "best_weights": _best,
    "evaluation": _evaluated,
    "static_tensors": _static,
    "noise_and_targets": _noisy,
    "meter_that_is_reset": _meter,
    "public_statistics": _normalized_data,
    "plateau": _plateau,
    "statistics_of_outputs": _gathered_statistics,
    "loss_without_gradients": _unused_difference,
    "generator": _generator,
    "small_generator": _small_generator,
    "generator_of_a_frozen_critic": _generator_of_a_frozen_critic,
}
_AGAIN = ("own_bank", "own_weights", "noise_and_targets", "static_tensors", "printed_losses", "evaluation")
"""Loops that also run on the same samples in each step, in the same order and in another one."""


# --- the judge ---
def _batches(seed: int, repeated: str) -> list[Batch]:
    """Three batches: of new samples, of the same ones, or of the same ones in another order."""
    seed_all(seed + 1)
    found: list[Batch] = []
    for at in range(3):
        batch = {
            "x": torch.randn(_SIZE, 6, dtype=torch.float64),
            "y": torch.tensor([0, 1, 1, 2, 3, 0]),
            "index": torch.arange(_SIZE) * 2 + 12 * at,
        }
        if repeated and at:
            order = torch.arange(_SIZE) if repeated == "same" else torch.tensor([3, 0, 4, 1, 5, 2])
            batch = found[-1] if repeated == "same" else {key: value[order] for key, value in found[-1].items()}
        found.append(batch)
    return found


def _sums_by_hand(body: Body, build: Callable[[], nn.Module], batches: list[Batch], others: int) -> list[Any]:
    """The clipped sums of each step, of samples whose index is not `others`, with parameters that stay."""
    seed_all(0)
    model, found = build().double(), []
    state = _state(model)
    for batch in batches:

        def train(*parts: torch.Tensor, batch: Batch = batch) -> None:
            total = [torch.zeros_like(p) for p in model.parameters()]
            indices = batch["index"].tolist()
            for loss, index in [each for losses in parts for each in zip(losses, indices, strict=False)]:
                g = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                factor = min(1.0, _BOUND / (norm_of(g) + 1e-6)) if index != others else 0.0
                total = [a + factor * each for a, each in zip(total, g, strict=True)]
            found.append(total)

        body(model, batch, train, state)
    return found


def _carried(body: Body, build: Callable[[], nn.Module], batches: list[Batch]) -> float:
    """How far the sums of other samples in later steps move with a sample of the first step, in units of C."""
    worst, first = 0.0, batches[0]
    for n in (0, _SIZE - 1):
        other = {**first, "x": first["x"].clone()}
        other["x"][n] = -3 * first["x"][n] + 1
        index = int(first["index"][n])
        a, b = (_sums_by_hand(body, build, [each, *batches[1:]], index) for each in (first, other))
        moved = [norm_of([x - y for x, y in zip(c, d, strict=True)]) for c, d in zip(a[1:], b[1:], strict=True)]
        worst = max(worst, *(each / _BOUND for each in moved))
    return worst


def _run(
    body: Body, build: Callable[[], nn.Module], batches: list[Batch], sums: list[Any] | None = None, **options: Any
) -> str:
    """Runs the loop under flash_clip. Returns what the refusal says; `sums` gets the clipped sum of each step."""
    seed_all(0)
    model = build().double()
    state = _state(model)
    module: Any = GradSampleModuleFlashClip(model, loss_reduction="sum", max_grad_norm=_BOUND, **options)
    optimizer = DPOptimizerFlashClip(
        torch.optim.SGD(model.parameters(), lr=0.0),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=_BOUND,
        expected_batch_size=1,
        loss_reduction="sum",
    )

    def train(*parts: torch.Tensor) -> None:
        for i, losses in enumerate(parts):
            losses.sum().backward(retain_graph=i + 1 < len(parts))  # type: ignore[no-untyped-call]
        optimizer.step()
        if sums is not None:
            sums.append([gradient_of(p) for p in model.parameters()])
        optimizer.zero_grad()

    try:
        for batch in batches:
            body(module, batch, train, state)
    except MemprofError as error:
        return str(error)
    return ""


def _program(name: str, body: Body, repeated: str = "", **options: Any) -> Program:
    build = _MODELS.get(name, _model)
    is_clean = body in CLEAN.values()

    def run(seed: int) -> Verdict:
        batches = _batches(seed, repeated)
        moved = _carried(body, build, batches)
        if is_clean != (moved < 1e-9):
            return Verdict("crash", moved, f"the program moves other samples' sums by {moved:.3g} C")
        message = _run(body, build, batches, **options)
        if not message and moved > 1e-9:
            return Verdict("wrong", moved, f"other samples' sums move by {moved:.3g} C")
        is_right = not message or "left in an earlier step" in message
        return Verdict(("refused" if is_right else "wrong") if message else "exact", moved, message)

    suffix = "".join(f"_{each}" for each in (repeated, *options.values()) if each)
    return Program(f"left_{name}{suffix}", build, list, "exact" if is_clean else "refused", run=run)


PROGRAMS = [
    *(_program(name, body) for name, body in LEAVES.items()),
    *(_program(name, LEAVES[name], check=check) for name in ("queue", "mean_loss") for check in ("first", "always")),
    *(_program(name, LEAVES[name], passes=2) for name in ("queue_after_the_step",)),
    *(_program(name, LEAVES[name], "same") for name in ("queue", "center", "mean_loss_as_a_number")),
    *(_program(name, body) for name, body in CLEAN.items()),
    *(_program(name, CLEAN[name], repeated) for name in _AGAIN for repeated in ("same", "reordered")),
]
