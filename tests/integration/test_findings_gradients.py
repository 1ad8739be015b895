# SPDX-License-Identifier: Apache-2.0
"""Gradients and noise that a training makes in vain, planted on the CPU and found with their bytes."""

import gc
from pathlib import Path
from typing import Any

import opacus.optimizers.optimizer
import pytest
import torch
from opacus.grad_sample import grad_sample_module
from torch import nn

from opacus_memprof.clipping import adopt_grad_samples
from tests.integration.planted_findings import (
    BATCH,
    FLOAT,
    Training,
    drop_gradients,
    kinds,
    mlp,
    of_kind,
    profiled,
)

pytestmark = pytest.mark.usefixtures("clean_process")


class HalfFrozen(nn.Module):
    def __init__(self, freeze: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = nn.Linear(24, 16)
        self.mixed.weight.requires_grad_(not freeze)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mixed(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("freeze", [True, False])
def test_functorch_and_frozen_parameters(tmp_path: Path, freeze: bool) -> None:
    def run(session: Any) -> None:
        training = Training(HalfFrozen(freeze), "functorch")
        for batch in (BATCH, 2 * BATCH, BATCH):
            training.step(torch.randn(batch, 24))

    found = of_kind(profiled(tmp_path, run), "frozen_per_sample_gradients")
    if freeze:
        assert [(finding["module"], finding["bytes"]) for finding in found] == [("mixed", 2 * BATCH * 24 * 16 * FLOAT)]
        assert f"{2 * BATCH} samples" in found[0]["evidence"]
    else:
        assert found == []


def test_modules_in_eval_mode_are_not_reported_as_unused(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        model = HalfFrozen(freeze=False)
        model.beside = nn.Linear(2, 2)
        training = Training(model)
        model.beside.eval()
        training.step(torch.randn(BATCH, 24))

    (found,) = of_kind(profiled(tmp_path, run, ValueError), "missing_per_sample_gradients")
    assert found["module"] == "beside"
    assert "in eval mode" in found["evidence"]


def test_gradients_that_nobody_reads(tmp_path: Path) -> None:
    """With one sample, gradients weigh as much as per-sample gradients; the peak is in backward or clipping."""
    parameters = {}

    def run(session: Any) -> None:
        training = Training(mlp(), noise=0.0)
        training.step(torch.randn(1, 8))
        parameters["as it is"] = [p.detach().clone() for p in training.trained]

    profile = profiled(tmp_path / "as it is", run)
    peak = profile["devices"]["cpu"]["peak"]
    (found,) = of_kind(profile, "discarded_gradients")
    assert found["bytes"] == FLOAT * (16 * 8 + 16 + 4 * 16 + 4)  # none had been replaced yet
    assert peak["phase"] == "noise"
    assert peak["categories"]["gradients"] == found["bytes"] + FLOAT * 16 * 8  # the first that is to replace one
    assert found["modules"] == {"0": FLOAT * (16 * 8 + 16), "2": FLOAT * (4 * 16 + 4)}

    def fixed(session: Any) -> None:
        training = Training(mlp(), noise=0.0)
        drop_gradients(training)
        training.step(torch.randn(1, 8))
        parameters["fixed"] = [p.detach().clone() for p in training.trained]

    profile = profiled(tmp_path / "fixed", fixed)
    assert "discarded_gradients" not in kinds(profile)
    assert all(map(torch.equal, parameters["as it is"], parameters["fixed"]))


@pytest.mark.parametrize("mode", ["ghost", "flash_clip"])
def test_gradients_that_are_used(tmp_path: Path, mode: str) -> None:
    def run(session: Any) -> None:
        training = Training(mlp(), mode)
        for _ in range(3):
            training.step(torch.randn(1, 8))

    assert "discarded_gradients" not in kinds(profiled(tmp_path, run))


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_per_sample_gradients_that_are_copied(mode: str, tmp_path: Path) -> None:
    """One large Linear: what its sampler has returned, and the copy. The remedy halves them, and changes no bit."""
    samples, parameter = 16, 201 * 100 * FLOAT
    weight, bias = samples * 200 * 100 * FLOAT, samples * 100 * FLOAT
    parameters: dict[str, list[torch.Tensor]] = {}
    peaks: dict[str, Any] = {}

    def run(name: str) -> set[str]:
        def train(session: Any) -> None:
            torch.manual_seed(0)
            training = Training(nn.Sequential(nn.Linear(200, 100)), mode)
            for _ in range(2):
                training.step(torch.randn(samples, 200))
            parameters[name] = [p.detach().clone() for p in training.trained]

        gc.collect()
        profile = profiled(tmp_path / name, train)
        peaks[name] = profile["devices"]["cpu"]["peak"]
        for found in of_kind(profile, "copied_per_sample_gradients"):
            assert found["bytes"] in (weight, weight + bias)  # the bias' may be backprops, without a sum over tokens
            assert found["module"] == "0"
        return kinds(profile)

    assert "copied_per_sample_gradients" in run("as it is")
    before = vars(grad_sample_module)["create_or_accumulate_grad_sample"]
    restore = adopt_grad_samples()
    try:
        assert "copied_per_sample_gradients" not in run("adopted")
    finally:
        restore()
    assert vars(grad_sample_module)["create_or_accumulate_grad_sample"] is before
    saved = peaks["as it is"]["requested_bytes"] - peaks["adopted"]["requested_bytes"]
    assert peaks["adopted"]["phase"] == "noise"  # p.grad, sum, and noise three times: next to what is saved
    assert weight > saved > weight - 6 * parameter
    assert all(map(torch.equal, parameters["as it is"], parameters["adopted"]))


class Twice(nn.Module):
    """One Linear that is used twice, on inputs of two lengths of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.relu(self.shared(x)))  # type: ignore[no-any-return]


def test_copies_that_are_needed_stay(clean_process: None) -> None:
    """Gradients of a parameter that is used twice add up, in the copy of the first."""

    def gradients() -> list[torch.Tensor]:
        training = Training(Twice())
        torch.manual_seed(1)
        training.criterion(training.model(torch.randn(BATCH, 8)), torch.zeros(BATCH)).backward()
        return [p.grad_sample for p in training.trained]

    wanted = gradients()
    restore = adopt_grad_samples()
    try:
        assert all(map(torch.equal, gradients(), wanted))
    finally:
        restore()


def big_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1000, bias=False))


@pytest.mark.parametrize("records_graph", [True, False])
def test_forwards_beside_torch_func(tmp_path: Path, records_graph: bool) -> None:
    """In the mode no_op the program computes per-sample gradients itself, and calls the model once more for outputs."""

    def run(session: Any) -> None:
        training = Training(mlp(), "no_op")
        model, names = training.model, [name for name, _ in training.model.named_parameters()]

        def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (sample[None],)).square().mean()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        for _ in range(3):
            x = torch.randn(64, 8)
            with torch.set_grad_enabled(records_graph):
                output = model(x)
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            samples = gradients(weights, x)
            for name in names:
                model.get_parameter(name).grad_sample = samples[name].detach()
            training.optimizer.step()
            training.optimizer.zero_grad()
            del output

    found = of_kind(profiled(tmp_path, run), "graphs_without_backward")
    # The ReLU's output, which the graph saves, and the model's, which the program holds.
    assert [finding["bytes"] for finding in found] == [64 * (16 + 4) * FLOAT] * records_graph


def test_noise_that_is_allocated_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample and one large parameter: 2|p| of noise beside p, its gradients and its sum."""

    def run(session: Any) -> None:
        training = Training(big_head())
        drop_gradients(training)
        training.step(torch.randn(1, 2))

    profile = profiled(tmp_path / "twice", run)
    (found,) = of_kind(profile, "noise_allocated_twice")
    assert found["bytes"] == 4 * 1000 * FLOAT
    assert found["module"] == "1"

    original = opacus.optimizers.optimizer._generate_noise

    def _generate_noise(std: float, reference: Any, generator: Any = None, secure_mode: bool = False) -> Any:
        if std == 0 or secure_mode:
            return original(std, reference, generator, secure_mode)
        return torch.normal(0, std, reference.shape, device=reference.device, generator=generator)

    monkeypatch.setattr(opacus.optimizers.optimizer, "_generate_noise", _generate_noise)
    assert "noise_allocated_twice" not in kinds(profiled(tmp_path / "once", run))


@pytest.mark.parametrize("how", ["as it is", "no_grad", "frozen", "trained", "for its input"])
def test_a_teacher_that_records_graphs_is_named(tmp_path: Path, how: str) -> None:
    """What it keeps is the activation between its layers: its input is not its own, and its output is used."""
    samples, width = 400, 1000

    def run(session: Any) -> None:
        training = Training(nn.Linear(100, 4))
        teacher = nn.Sequential(nn.Linear(100, width), nn.Sigmoid(), nn.Linear(width, width), nn.Sigmoid())
        teacher.requires_grad_(how != "frozen")
        others = [torch.optim.SGD(teacher.parameters(), lr=0.1)] if how == "trained" else []
        for _ in range(4):
            x = torch.randn(samples, 100, requires_grad=how == "for its input")
            with torch.set_grad_enabled(how != "no_grad"):
                soft = teacher(x)
            training.step(x.detach() + soft.detach()[:, :100])
        del others

    found = [
        each for each in of_kind(profiled(tmp_path, run), "graphs_without_backward") if "teacher" in each["remedy"]
    ]
    assert len(found) == (how == "as it is")
    for each in found:
        assert each["bytes"] == samples * width * FLOAT
        assert each["remedy"].startswith("call teacher under torch.no_grad(), or teacher.requires_grad_(False)")
