# SPDX-License-Identifier: Apache-2.0
"""Loops in which numbers of a batch leave torch before its loss, and hooks on the model's output.

The oracle runs the loop with a plain model, changes one sample, and clips the other samples' gradients by hand.
"""

import copy
import math
import statistics
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.exactness.judge import Batch, Verdict
from tests.exactness.program import Program
from tests.exactness.programs.left import (
    _BOUND,
    _SIZE,
    Body,
    Train,
    _batches,
    _entropy,
    _model,
    _run,
    _squares,
    _sums_by_hand,
)
from tests.exactness.tensors import norm_of


def _sum_under_a_mode(losses: torch.Tensor) -> float:
    """The inverse of the sum of a list that is read while a mode of the program's own is on."""
    with FlopCounterMode(display=False):
        return 1 / sum(losses.tolist())


def _scaled(scale: Any) -> Body:
    """The losses times what a function makes of them."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        losses = _entropy(m(b["x"]), b)
        train(losses * scale(losses.detach()))

    return body


def _ranks(losses: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0 + numpy.argsort(numpy.argsort(losses.numpy())), dtype=losses.dtype)


def _easier_half(losses: torch.Tensor) -> torch.Tensor:
    array = losses.numpy()
    return torch.from_numpy((array < numpy.median(array)).astype(float))


def _hardest(losses: torch.Tensor) -> torch.Tensor:
    weights = torch.zeros_like(losses)
    weights[numpy.argsort(losses.numpy())[:3]] = 1
    return weights


def _without_the_hardest(losses: torch.Tensor) -> torch.Tensor:
    weights = torch.ones_like(losses)
    weights[losses.argmax()] = 0
    return weights


def _up_to_a_class(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    end = int(h.mean(0)[:3].argmax()) + 1
    train(_entropy(h, b) + h[:, :end].square().sum(1))


def _by_the_number_of_hard_ones(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    hard = losses[losses.detach() > losses.detach().mean()]
    train(losses / max(len(hard), 1))


def _without_easy_ones(losses: torch.Tensor) -> torch.Tensor:
    hard = (losses > 1.1 * losses.mean()).nonzero().squeeze(1)
    return torch.zeros_like(losses).index_fill(0, hard, 1.0)


def _weighted_class(m: Any, b: Batch, train: Train, s: Any) -> None:
    h, weights = m(b["x"]), torch.ones(4, dtype=torch.float64)
    weights[h.detach().mean(0).argmax()] = 2
    train(_entropy(h, b) * weights[b["y"]])


def _called_by_a_thread(weigh: Callable[[torch.Tensor], torch.Tensor]) -> Body:
    """Every second step calls the model in a thread of its own, which is gone when backward begins."""

    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        s.at += 1
        found = []
        thread = threading.Thread(target=lambda: found.append(m(b["x"])))
        if s.at % 2 == 0:
            thread.start()
            thread.join()
        losses = _entropy(found[0] if found else m(b["x"]), b)
        train(losses * weigh(losses.detach()))

    return body


def _centered(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train((h - torch.from_numpy(h.detach().numpy().mean(0))).square().sum(1))


def _clamped(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    train(losses.clamp(max=float(numpy.percentile(losses.detach().numpy(), 70))))


def _called_again(m: Any, b: Batch, train: Train, s: Any) -> None:
    spread = float(m(b["x"]).detach().numpy().std())
    train(_squares(m(b["x"] / spread)))


def _mixing_hook(m: Any, b: Batch, train: Train, s: Any) -> None:
    """From the second step on."""
    s.at += 1
    h = m(b["x"])
    if s.at > 1:
        h.register_hook(lambda g: g - g.mean(0))
    train(_entropy(h, b))


_MIXED: dict[str, Body] = {
    "mean_of_an_array": _scaled(lambda losses: losses.numpy().mean()),
    "list_under_a_mode": _scaled(_sum_under_a_mode),
    "median_of_a_list": _scaled(lambda losses: statistics.median(losses.tolist())),
    "exponential": _scaled(lambda losses: math.exp(-losses.mean().item())),
    "logistic": _scaled(lambda losses: 1 / (1 + math.exp(-float(losses.mean())))),
    "power": _scaled(lambda losses: losses.mean().item() ** 0.3),
    "line": _scaled(lambda losses: 0.37 + 1.3 * losses.mean().item()),
    "rounded": _scaled(lambda losses: round(losses.mean().item(), 2)),
    "ranks": _scaled(_ranks),
    "easier_half": _scaled(_easier_half),
    "hardest": _scaled(_hardest),
    "center": _centered,
    "percentile": _clamped,
    "second_call": _called_again,
    "hook": _mixing_hook,
    "hardest_by_its_index": _scaled(_without_the_hardest),
    "end_by_an_index": _up_to_a_class,
    "number_of_hard_ones": _by_the_number_of_hard_ones,
    "loss_by_its_index": _scaled(lambda losses: losses[losses.argmax()]),
    "mean_of_hard_ones": _scaled(lambda losses: losses[losses > losses.mean()].mean()),
    "indices_of_hard_ones": _scaled(_without_easy_ones),
    "class_by_its_index": _weighted_class,
    "called_by_a_thread": _called_by_a_thread(lambda losses: losses / losses.sum()),
}


# --- of one sample alone, for printing, or the program's own ---
def _items(m: Any, b: Batch, train: Train, s: Any) -> None:
    """A loop over the samples, in which each is weighted by numbers of its own."""
    h = m(b["x"])
    losses, lengths = _entropy(h, b), (b["x"].abs().sum(1)).long() + 1
    rows = [each * b["x"][n, 0].item() / lengths[n].item() + h[n].sum() for n, each in enumerate(losses)]
    train(torch.stack(rows))


def _list_of_lengths(m: Any, b: Batch, train: Train, s: Any) -> None:
    lengths = m(b["x"]), ((3 * b["x"].abs()).sum(1).long() + 1).tolist()
    train(torch.stack([each.square().sum() / n for each, n in zip(*lengths, strict=True)]))


def _own_array(m: Any, b: Batch, train: Train, s: Any) -> None:
    h = m(b["x"])
    train(_entropy(h, b) / torch.from_numpy(b["x"].abs().sum(1).numpy()))


def _printed(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Accuracy, histograms and losses before backward, and a schedule that was made before the call."""
    s.at += 1
    weight = 0.1234567 * math.cos(s.at / 7)
    h = m(b["x"])
    s.numbers.append((h.argmax(1).numpy() == b["y"].numpy()).mean())
    labels = torch.tensor(b["y"].tolist())
    losses = functional.cross_entropy(h, labels, reduction="none") + weight * _squares(h)
    s.numbers.append((losses.tolist(), numpy.histogram(h.detach().numpy()), losses.mean().item()))
    train(losses / 4 / math.log(10))


def _looked_at(m: Any, b: Batch, train: Train, s: Any) -> None:
    """The hardest sample and the number of right ones are kept for a log; the loop over samples counts in integers."""
    h = m(b["x"])
    losses, right = _entropy(h, b), int((h.argmax(1) == b["y"]).sum())
    hardest = int(losses.argmax())
    s.numbers.append((right, hardest, b["x"][hardest].clone(), h[losses.argmax()].detach().sum()))
    s.last = losses[losses.argmin()]  # a view at the place of one that the loop makes
    train(torch.stack([losses[n] / 3 for n in range(len(losses))]) + h[:, right % 1])


def _parts_by_label(m: Any, b: Batch, train: Train, s: Any) -> None:
    """Integers of one sample each, and lengths of parts, which are equal to others by chance."""
    h, ends = m(b["x"]), (b["x"] > 0).long() + 1
    rows = [h[n, h[n].argmax()] - h[n, int(b["y"][n])] for n in range(len(h))]
    for column in range(6):
        for n in range(len(h)):
            end = ends[n, column].item()
            rows[n] = rows[n] + h[n, :end].mean()
    for label in range(4):
        s.numbers.append(len(h[b["y"] == label] * (label + 1)))
    train(torch.stack(rows))


def _guarded(m: Any, b: Batch, train: Train, s: Any) -> None:
    losses = _entropy(m(b["x"]), b)
    if not torch.isfinite(losses.sum()) or math.isnan(losses.sum().item()) or losses.detach().numpy().max() > 1e6:
        return
    if losses.mean().item() < (s.ema or math.inf):
        s.ema, s.last = losses.mean().item(), copy.deepcopy(getattr(m, "_module", m))
    train(losses)


def _hooked(hook: Any) -> Body:
    def body(m: Any, b: Batch, train: Train, s: Any) -> None:
        h = m(b["x"])
        h.register_hook(hook)
        train(_entropy(h, b))

    return body


_CLEAN: dict[str, Body] = {
    "items_of_one_sample": _items,
    "list_of_lengths": _list_of_lengths,
    "own_array": _own_array,
    "printed": _printed,
    "looked_at": _looked_at,
    "parts_by_label": _parts_by_label,
    "called_in_a_thread": _called_by_a_thread(torch.exp),
    "guarded": _guarded,
    "hook_that_looks": _hooked(lambda g: print(end=f"{float(g.norm()):.0f}"[:0])),
    "hook_that_scales": _hooked(lambda g: 0.5 * g),
    "hook_that_clamps": _hooked(lambda g: g.clamp(-0.1, 0.1)),
}


def moved_by_a_sample(body: Body, batches: list[Batch]) -> float:
    """How far a sample of the first or second step moves the sums of other samples, in units of C."""
    moved = 0.0
    for step, first in enumerate(batches[:2]):
        for n in (0, _SIZE - 1):
            other = {**first, "x": first["x"].clone()}
            other["x"][n] = -3 * first["x"][n] + 1
            changed = [other if at == step else each for at, each in enumerate(batches)]
            index = int(first["index"][n])
            sums = [_sums_by_hand(body, _model, each, index) for each in (batches, changed)]
            for a, b in zip(*sums, strict=True):
                moved = max(moved, norm_of([x - y for x, y in zip(a, b, strict=True)]) / _BOUND)
    return moved


def _program(name: str, body: Body) -> Program:
    def run(seed: int) -> Verdict:
        batches, is_clean = _batches(seed, ""), name in _CLEAN
        moved = moved_by_a_sample(body, batches)
        if is_clean != (moved < 1e-9):
            return Verdict("crash", moved, f"the program moves other samples' sums by {moved:.3g} C")
        message = _run(body, _model, batches)
        is_right = not message or "of one sample each" in message or "between two calls" in message
        outcome: Any = "wrong" if (moved > 1e-9 and not message) or not is_right else "refused" if message else "exact"
        return Verdict(outcome, moved, message or f"other samples' sums move by {moved:.3g} C")

    return Program(f"outside_{name}", _model, list, "exact" if name in _CLEAN else "refused", run=run)


PROGRAMS = [_program(name, body) for name, body in (_MIXED | _CLEAN).items()]
