# SPDX-License-Identifier: Apache-2.0
"""The parts of `doctor --script` that compute, against formulas."""

import contextlib
import copy
import math

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from rich.console import Console
from torch import nn

from opacus_memprof.loop_check.by_hand import check_noise, clip_by_hand, mixing_module, per_sample_gradients
from opacus_memprof.loop_check.follow import Follower
from opacus_memprof.loop_check.loss import LossScale
from opacus_memprof.loop_check.records import (
    Call,
    Findings,
    LogicalStep,
    NotCheckedError,
    PhysicalBatch,
    PrivateModel,
    RandomState,
)
from opacus_memprof.loop_check.script import ScriptVerdict, print_verdict


def recorded(model: nn.Module, x: torch.Tensor, cotangent: torch.Tensor, reduction: str = "sum") -> PhysicalBatch:
    """A batch as a script's call of the model would leave it."""
    root = PrivateModel(GradSampleModule(copy.deepcopy(model), loss_reduction=reduction), model)
    random = RandomState()
    call = Call(root, (x,), {}, random, {}, [m.training for m in model.modules()], contextlib.nullcontext)
    call.outputs[0] = model(x).detach()
    call.cotangents[0] = cotangent
    return PhysicalBatch([call], 1.0, False)


def test_gradients_of_a_linear_layer_are_outer_products() -> None:
    torch.manual_seed(0)
    x, c = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for reduction, scale in (("sum", 1.0), ("mean", 5.0)):
        batch = recorded(nn.Linear(3, 2).double(), x, c, reduction)
        for n, gradients in enumerate(per_sample_gradients(batch)):
            assert torch.allclose(gradients["weight"], scale * torch.outer(c[n], x[n]))
            assert torch.allclose(gradients["bias"], scale * c[n])


def test_the_clipped_sum_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    x, c = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    norms = c.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
    bound = float(norms.median())
    found = clip_by_hand(recorded(nn.Linear(3, 2).double(), x, c), bound, ["weight", "bias"])
    factors = (bound / (norms + 1e-6)).clamp(max=1)
    assert torch.allclose(torch.tensor(found.norms, dtype=torch.float64), norms)
    assert found.clipped == int((factors < 1).sum())
    assert torch.allclose(found.total["weight"], torch.einsum("n,no,ni->oi", factors, c, x))
    by_parameter = clip_by_hand(recorded(nn.Linear(3, 2).double(), x, c), [math.inf, 0.1], ["weight", "bias"])
    assert torch.allclose(by_parameter.total["weight"], c.T @ x)
    assert torch.allclose(by_parameter.total["bias"], (0.1 / (c.norm(dim=1) + 1e-6)).clamp(max=1) @ c)
    alone = clip_by_hand(recorded(nn.Linear(3, 2).double(), x, c), math.inf, ["bias"])
    assert torch.allclose(torch.tensor(alone.norms, dtype=torch.float64), c.norm(dim=1))


class Centred(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift, self.drop, self.linear = shift, nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.drop(x) - self.shift * x[-1:])
        return result


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_mixing_is_found_whichever_sample_it_comes_from(size: int) -> None:
    torch.manual_seed(0)
    x, c = torch.randn(size, 4), torch.randn(size, 4)
    for shift, expected in ((0.0, None), (0.01, "linear")):
        torch.manual_seed(1)
        found = mixing_module(recorded_with_dropout(Centred(shift), x, c).calls[0])
        assert (found and found[0]) == expected


def recorded_with_dropout(model: nn.Module, x: torch.Tensor, c: torch.Tensor) -> PhysicalBatch:
    batch = recorded(model, x, c)
    call = batch.calls[0]
    call.random.restore()
    call.outputs[0] = model(x).detach()
    return batch


def test_changed_parameters_are_noticed() -> None:
    model = nn.Linear(3, 2)
    batch = recorded(model, torch.randn(4, 3), torch.randn(4, 2))
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(NotCheckedError, match="other outputs when it is run again"):
        list(per_sample_gradients(batch))


def test_the_random_numbers_are_left_as_they_were() -> None:
    state = RandomState()
    torch.randn(3)
    assert RandomState().differs(state)
    state.restore()
    assert not RandomState().differs(state)


@pytest.mark.parametrize(
    ("stds", "words"),
    [
        ((1.0, 1.0), None),
        ((1.0, 0.0), "No noise is added to b"),
        ((1.2, 1.0), "in a it is 1.2"),
        ((0.7, 0.7), "in a it is 0.7"),
    ],
)
def test_noise_with_a_planted_standard_deviation(stds: tuple[float, float], words: str | None) -> None:
    torch.manual_seed(0)
    trained = {"a": nn.Parameter(torch.zeros(100, 100)), "b": nn.Parameter(torch.zeros(50))}
    step = LogicalStep([], 1, 3.0)
    for p, std in zip(trained.values(), stds, strict=True):
        step.summed[id(p)] = torch.randn_like(p)
        step.noised[id(p)] = step.summed[id(p)] + 3.0 * std * torch.randn_like(p)
    findings = Findings()
    check_noise(step, trained, findings)
    assert len(findings.defects) == (words is not None)
    assert words is None or words in findings.defects[0]


def test_factors_of_losses() -> None:
    scale, x = LossScale(), torch.randn(4, requires_grad=True)
    weights = torch.rand(4)
    for loss, factor in (
        (x.sum(), 1.0),
        (x.sum() / 4, 0.25),
        (3 * (x.sum() / 4), 0.75),
        (x.sum() * torch.tensor(8.0), 8.0),
        ((x * weights).sum(), 1.0),
        (x.sum() * x.mean(), 1.0),
    ):
        assert scale.factor_of(loss) == (pytest.approx(factor), False)


def test_a_check_that_fails_gives_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower()
    with follower._pause():
        raise RuntimeError("no such kernel")
    verdict = ScriptVerdict("hooks", [], [], [], [], follower.findings.failure)
    print_verdict(verdict, Console())
    assert not verdict.is_good
    assert "The check itself failed (RuntimeError: no such kernel)" in capsys.readouterr().out
