# SPDX-License-Identifier: Apache-2.0
"""A refused step leaves everything as it was, and samples whose norm is not finite can be dropped instead."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.errors import MemprofError
from tests.integration.clipping_by_hand import Batch, by_hand
from tests.integration.flash_clip_models import MODELS, Engine, mlp, token_data, vector_data
from tests.integration.test_clipping_net import ADAPTIVE
from tests.integration.test_clipping_precision import Own, Tied


class Training:
    """A model, its private optimizer, and the engine with its accountant."""

    def __init__(self, clipping: str = "flat", own_generator: bool = True, **options: Any) -> None:
        torch.manual_seed(5)
        model = mlp().double()
        bounds = [0.1, 0.2, 0.3] if clipping == "per_layer" else 0.3
        self.engine = Engine()
        self.module, self.optimizer, _ = self.engine.make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            data_loader=DataLoader(vector_data(8), batch_size=4),
            grad_sample_mode="flash_clip",
            noise_multiplier=0.7,
            max_grad_norm=bounds,
            clipping=clipping,
            poisson_sampling=False,
            noise_generator=torch.Generator().manual_seed(11) if own_generator else None,
            **(ADAPTIVE if clipping == "adaptive" else {}),
            **options,
        )
        torch.manual_seed(6)

    def backward(self, seed: int, value: float = 0.0) -> None:
        x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        x[2, 3] += value
        self.module(x).square().sum().backward()

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Any:
        """Everything that a refusal must leave."""
        generator = self.optimizer.generator
        return copy.deepcopy(
            {
                "parameters": [p.detach() for p in self.module.parameters()],
                "optimizer": self.optimizer.state_dict(),
                "accountant": self.engine.accountant.history,
                "default generator": torch.get_rng_state(),
                "generator": None if generator is None else generator.get_state(),
                "bound": (self.optimizer.max_grad_norm, self.optimizer.bookkeeping.rule.bounds),
            }
        )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def not_finite(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.backward(1, float("nan"))
    with pytest.raises(MemprofError, match=r"samples \[2\] of the batch is not finite"):
        training.optimizer.step()


def overflow(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.backward(1, 1e160)  # finite gradients, whose squared norm is not
    with pytest.raises(MemprofError, match=r"samples \[2\] of the batch is not finite"):
        training.optimizer.step()


def not_clipped(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        for name in ("factors", "factors_of"):
            own = getattr(ClipRule, name)
            planted.setattr(ClipRule, name, lambda *given, own=own: own(*given).mul_(1e3))
        training.backward(1)
        with pytest.raises(MemprofError, match="a sample was not clipped"):
            training.optimizer.step()


def no_backward(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemprofError, match="without a backward pass"):
        training.optimizer.step()


def no_gradient(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.backward(1)
    kept = training.optimizer.bookkeeping._passes[0].kept
    del kept[next(iter(kept))]
    with pytest.raises(MemprofError, match="no gradient reached"):
        training.optimizer.step()


def second_part(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three parts counts, and the second one is refused: with it go the sums of the first."""
    training.optimizer.signal_skip_step(True)
    training.backward(1)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.optimizer.signal_skip_step(True)
    not_finite(training, monkeypatch)


def refused_forward(training: Training) -> None:
    """The first of two parts counts, and the forward of the second one is refused, so that there is no step."""
    for skips in (True, False):
        training.optimizer.signal_skip_step(skips)  # as BatchMemoryManager does, before it yields a part
        if skips:
            training.step(1)
    others = {name: 2 * p for name, p in training.module.named_parameters()}
    with pytest.raises(MemprofError, match="other tensors instead of its parameters"):
        torch.func.functional_call(training.module, others, torch.ones(4, 9, dtype=torch.float64))


def forward_of_second_part(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    refused_forward(training)
    training.optimizer.zero_grad()


REFUSALS: list[Callable[[Training, pytest.MonkeyPatch], None]] = [
    not_finite,
    overflow,
    not_clipped,
    no_backward,
    no_gradient,
    second_part,
    forward_of_second_part,
]


@cache
def undisturbed(clipping: str, own_generator: bool) -> Any:
    """The state after the same steps without a refusal."""
    training = Training(clipping, own_generator)
    for seed in (0, 2):
        training.step(seed)
    return training.state()


@pytest.mark.parametrize(
    ("clipping", "own_generator"),
    [("flat", True), ("flat", False), ("per_layer", True), ("adaptive", False), ("automatic", True)],
)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_step_leaves_everything(
    refusal: Callable[[Training, pytest.MonkeyPatch], None],
    clipping: str,
    own_generator: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the training goes on as if it had not been."""
    training = Training(clipping, own_generator)
    training.step(0)
    before = training.state()
    refusal(training, monkeypatch)
    assert same(training.state(), before)
    assert all(p.summed_grad is None for p in training.module.parameters())
    training.optimizer.zero_grad()
    training.step(2)
    ended = training.state()
    assert same(ended, undisturbed(clipping, own_generator))


@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_the_loop_goes_on_after_a_refused_forward(clipping: str) -> None:
    """Without another zero_grad: the next batch has its own step, and nothing of the batch that was given up."""
    training, other = Training(clipping), Training(clipping)
    refused_forward(training)
    for each in (training, other):
        torch.manual_seed(6)
        for skips in (True, False):
            each.optimizer.signal_skip_step(skips)
            each.step(2 + skips)
    assert same(training.state(), other.state())
    assert [steps for _, _, steps in training.engine.accountant.history] == [1]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_that_is_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(MemprofError, match=r"cannot be copied or pickled"):
        copied(Training().optimizer)


def test_the_accountant_does_not_hear_of_a_refused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    calls: list[Any] = []
    training.optimizer.attach_step_hook(calls.append)
    not_finite(training, monkeypatch)
    not_clipped(training, monkeypatch)
    assert not calls
    training.step(0)
    assert calls == [training.optimizer]


def test_a_forgotten_zero_grad_draws_no_noise() -> None:
    training = Training()
    training.backward(0)
    training.optimizer.step()
    before, gradients = training.state(), [p.grad.clone() for p in training.module.parameters()]
    training.backward(1)
    with pytest.raises(ValueError, match="zero_grad"):
        training.optimizer.step()
    assert same(training.state(), before)
    assert same([p.grad for p in training.module.parameters()], gradients)
    training.optimizer.zero_grad()
    training.step(2)


def test_parts_of_a_batch_are_one_step() -> None:
    """The first parts move nothing, not even by Adam's momentum, and the accountant hears of the last one."""
    training = Training()
    training.backward(1)
    training.optimizer.step()
    for part in range(3):
        before = [p.detach().clone() for p in training.module.parameters()]
        training.optimizer.signal_skip_step(part < 2)
        training.optimizer.zero_grad(set_to_none=False)
        training.backward(part)
        training.optimizer.step()
        changed = [not torch.equal(p, q) for p, q in zip(training.module.parameters(), before, strict=True)]
        assert changed == [part == 2] * 3
    assert [steps for _, _, steps in training.engine.accountant.history] == [2]


# --- "drop" ---
def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    each = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none").unsqueeze(-1).flatten(1).mean(1)
    return each * batch["weight"]


ALL: dict[str, Any] = {**MODELS, "tied": (Tied, lambda n: token_data(n, 40)), "own": (Own, vector_data)}
BAD = {1: float("nan"), 4: float("inf")}


@pytest.mark.parametrize(("clipping", "passes"), [("flat", 1), ("flat", 2), ("per_layer", 1), ("automatic", 2)])
@pytest.mark.parametrize("name", ALL)
def test_dropped_samples_add_nothing(name: str, clipping: Any, passes: Any) -> None:
    """For each kind of layer, and for parameters that layers share, the sum is that of the other samples.

    The other samples are clipped by hand, one at a time.
    """
    torch.manual_seed(0)
    build, data = ALL[name]
    model = build().double()
    x, y = data(6).tensors
    weight = torch.ones(6, dtype=torch.float64)
    for index, value in BAD.items():
        weight[index] = value
    batch = {"x": x, "y": y, "weight": weight}
    rest = {key: value[[0, 2, 3, 5]] for key, value in batch.items()}
    trained = list(model.parameters())
    bound = [0.1 + 0.01 * i for i in range(len(trained))] if clipping == "per_layer" else 0.3
    expected = by_hand_with(model, rest, clipping, bound)
    module = GradSampleModuleFlashClip(
        model, loss_reduction="sum", max_grad_norm=bound, clipping=clipping, passes=passes, nonfinite="drop"
    )
    optimizer = DPOptimizerFlashClip(
        torch.optim.SGD(trained, lr=0.1),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    losses(module, batch).sum().backward()
    optimizer.pre_step()
    assert optimizer.dropped_samples == [1, 4]
    for parameter, total in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-8, atol=1e-12)


def by_hand_with(model: nn.Module, batch: Batch, clipping: str, bound: Any) -> list[torch.Tensor]:
    if clipping == "flat":
        return list(by_hand(model, batch, losses, bound)[1].values())
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for n in range(len(batch["y"])):
        loss = losses(model, {key: value[n : n + 1] for key, value in batch.items()}).sum()
        found = torch.autograd.grad(loss, parameters)
        norm = float(torch.stack([g.square().sum() for g in found]).sum().sqrt())
        for i, g in enumerate(found):
            factor = min(1.0, bound[i] / (float(g.norm()) + 1e-6)) if clipping == "per_layer" else bound / (norm + 0.01)
            total[i] += factor * g
    return total


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e160])
@pytest.mark.parametrize("passes", [1, 2])
def test_inputs_that_are_not_finite_are_dropped(passes: int, value: float) -> None:
    """Also gradients whose norm overflows, and in every physical batch of a step; they are counted through all."""
    dropping = Training(flash_clip_passes=passes)
    dropping.optimizer.bookkeeping.nonfinite = "drop"
    for part in range(3):
        dropping.optimizer.signal_skip_step(part < 2)
        dropping.backward(part, value if part else 0.0)
        dropping.optimizer.step()
        if part < 2:
            dropping.optimizer.zero_grad()
    assert dropping.optimizer.dropped_samples == [6, 10]
    assert all(p.isfinite().all() for p in dropping.module.parameters())
    dropping.optimizer.zero_grad()
    dropping.step(3)
    assert dropping.optimizer.dropped_samples == []
    assert dropping.optimizer.dropped_samples_in_all_steps == 2


def test_a_batch_of_which_nothing_is_left() -> None:
    """The step is noise alone."""
    torch.manual_seed(0)
    module = GradSampleModuleFlashClip(mlp().double(), loss_reduction="sum", nonfinite="drop")
    optimizer = DPOptimizerFlashClip(
        torch.optim.SGD(module.parameters(), lr=0.1),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    module(torch.full((3, 9), float("nan"), dtype=torch.float64)).sum().backward()
    optimizer.pre_step()
    assert optimizer.dropped_samples == [0, 1, 2]
    assert all(not p.grad.any() for p in module.parameters())


def test_what_happens_to_such_samples_is_one_of_two() -> None:
    with pytest.raises(MemprofError, match="flash_clip_nonfinite is 'skip'; it must be 'refuse' or 'drop'"):
        GradSampleModuleFlashClip(mlp(), nonfinite="skip")
