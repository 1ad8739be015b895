# SPDX-License-Identifier: Apache-2.0
"""privacy_check.json of trainings: what it says is what happened, and its schema allows it."""

import gc
import io
import json
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import PRIVACY_CHECK
from tests.integration.test_distributed import ENVIRONMENT
from tests.warm_python import interpreter

RANKS = Path(__file__).parent / "scripts" / "privacy_check_ranks.py"
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "privacy_check.schema.json"
BOUND = 0.7


class Scaled(nn.Module):
    """A layer, and a parameter that is used beside layers, so that a module is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        output: torch.Tensor = self.second(self.norm(torch.tanh(self.first(x)) * self.scale + shift))
        return output


class Mixing(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        return h - h.mean(0)


class Training:
    """A model that an engine has made private, and steps of it."""

    def __init__(self, model: nn.Module, mode: str = "flash_clip", batch: int = 8, **given: Any) -> None:
        torch.manual_seed(3)
        self.plain = model
        self.data = torch.randn(batch, 5), torch.randint(0, 3, (batch,))
        self.engine = opacus_memprof.PrivacyEngine()
        arguments: dict[str, Any] = {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "data_loader": DataLoader(TensorDataset(*self.data), batch_size=batch),
            "noise_multiplier": 0.0,
            "max_grad_norm": BOUND,
            "poisson_sampling": False,
            "grad_sample_mode": mode,
        }
        self.model, self.optimizer, self.loader = self.engine.make_private(**{**arguments, **given})

    def step(self, x: torch.Tensor | None = None, *args: Any) -> None:
        self.optimizer.zero_grad()
        x = self.data[0] if x is None else x
        nn.functional.cross_entropy(self.model(x, *args), self.data[1][: len(x)]).backward()
        self.optimizer.step()

    def check(self) -> dict[str, Any]:
        """What is said of the model. The schema allows the whole."""
        found: dict[str, Any] = json.loads(json.dumps(self.engine.privacy_check()))
        validate(found)
        (model,) = found["models"]
        return dict(model)


def validate(content: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(content)


def numbers(spans: list[dict[str, Any]]) -> list[int]:
    return [number for span in spans for number in range(span["first"], span["last"] + 1)]


@contextmanager
def directory_of_session(path: Path) -> Iterator[Path]:
    with opacus_memprof.profile(path, device="cpu"):
        yield path


def test_a_training_with_flash_clip() -> None:
    training = Training(Scaled())
    for _ in range(9):
        training.step()
    found = training.check()
    assert (found["model"], found["device"], found["mode"]) == ("Scaled", "cpu", "flash_clip")
    assert (found["clipping"], found["loss_reduction"], found["bounds"]) == ("flat", "mean", [])
    assert (found["max_grad_norm"], found["noise_multiplier"]) == ([BOUND, BOUND], [0.0, 0.0])
    assert (found["check"], found["nonfinite"], found["steps"], found["not_private"]["refused"]) == (
        "sometimes",
        "refuse",
        9,
        0,
    )
    assert found["in_every_step"] == ["finite_norms", "norm_of_clipped_sum", "situation"]
    (situation,) = found["situations"]
    checks = situation.pop("checks")
    assert numbers(checks["mixing"])[0] == numbers(checks["sums"])[0] == 1
    assert numbers(checks["explained"]) == [1, 8]
    assert situation == {
        "module": "",
        "arguments": "Tensor[B, n] float32",
        "autocast": None,
        "evaluating": [],
        "trained_parameters": 7,
        "trained_elements": 5 * 6 + 6 + 6 * 3 + 3 + 6 + 12,
        "tapped_layers": 3,
        "repeated": [{"module": "", "way": "vmap", "parameters": ["scale"]}],
        "batch_sizes": [8, 8],
        "orders": 1,
        "forwards": 9,
    }


def test_the_largest_sum_is_the_one_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    training = Training(model)
    largest = 0.0
    for _ in range(3):
        total = torch.zeros(model.weight.numel() + 3, dtype=torch.float64)
        for x, y in zip(*training.data, strict=True):
            weight, bias = (p.detach().double().requires_grad_() for p in (model.weight, model.bias))
            loss = nn.functional.cross_entropy(nn.functional.linear(x.double(), weight, bias), y)
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [weight, bias])])
            total += gradient * min(1.0, BOUND / (float(gradient.norm()) + 1e-6))
        largest = max(largest, float(total.norm()) / (BOUND * len(training.data[0])))
        training.step()
    assert training.check()["not_private"]["largest_sum"] == pytest.approx(largest, rel=1e-5)


def test_situations_of_all_kinds_are_told_apart() -> None:
    model = Scaled()
    training = Training(model)
    training.step()
    training.step(training.data[0][:3])  # another size
    training.model(training.data[0][:0])  # empty: no forward of a situation
    training.step(training.data[0], 0.5)  # another argument
    model.norm.eval()
    training.step()
    found = training.check()
    situations = found["situations"]
    assert found["steps"] == sum(each["forwards"] for each in situations) == 4
    assert [each["arguments"] for each in situations].count("Tensor[B, n] float32, float") == 1
    assert [each["evaluating"] for each in situations] == [[], [], ["norm"]]
    assert situations[0]["batch_sizes"] == [3, 8]  # alike except for their size


def test_a_training_that_was_refused() -> None:
    training = Training(Mixing())
    with pytest.raises(MemprofError) as refusal:
        training.step()
    found = training.check()
    assert (found["steps"], found["not_private"]["refused"], found["situations"]) == (0, 1, [])
    assert found["not_private"]["refusals"] == [{"step": 1, "reason": str(refusal.value), "times": 1}]


def test_a_step_that_was_refused() -> None:
    training = Training(nn.Linear(5, 3))
    training.step()
    training.data[0][2] = float("nan")
    with pytest.raises(MemprofError, match=r"samples \[2\] of the batch") as refusal:
        training.step()
    training.data[0][2] = 1.0
    training.step()
    found = training.check()
    assert (found["steps"], found["not_private"]["refused"]) == (2, 1)
    assert found["not_private"]["refusals"] == [{"step": 2, "reason": str(refusal.value), "times": 1}]


def test_samples_that_are_dropped_are_counted() -> None:
    training = Training(nn.Linear(5, 3), flash_clip_nonfinite="drop")
    training.step()
    training.data[0][2:4] = float("inf")
    training.step()
    found = training.check()
    assert (found["nonfinite"], found["steps"], found["not_private"]["dropped_samples"]) == ("drop", 2, 2)


def test_steps_that_are_skipped_do_not_count() -> None:
    training = Training(nn.Linear(5, 3))
    with BatchMemoryManager(
        data_loader=training.loader, max_physical_batch_size=4, optimizer=training.optimizer
    ) as loader:
        for x, y in loader:
            training.optimizer.zero_grad()
            nn.functional.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
    found = training.check()
    assert (found["steps"], found["situations"][0]["forwards"], found["situations"][0]["batch_sizes"]) == (1, 2, [4, 4])


def test_a_scheduler_widens_the_range_of_bounds() -> None:
    training = Training(nn.Linear(5, 3), noise_multiplier=1.0)
    for bound, noise in ((BOUND, 1.0), (0.5, 1.5), (0.6, 1.25)):
        training.optimizer.max_grad_norm, training.optimizer.noise_multiplier = bound, noise
        training.step()
    found = training.check()
    assert (found["max_grad_norm"], found["noise_multiplier"]) == ([0.5, BOUND], [1.0, 1.5])


def test_bounds_of_parameters_are_listed() -> None:
    training = Training(nn.Linear(5, 3), clipping="per_layer", max_grad_norm=[0.3, 0.4])
    training.step()
    found = training.check()
    assert (found["clipping"], found["bounds"]) == ("per_layer", [0.3, 0.4])
    assert found["max_grad_norm"] == pytest.approx([0.5, 0.5])


def test_nothing_is_said_to_be_proved_with_check_off() -> None:
    training = Training(nn.Linear(5, 3), check="off")
    training.step()
    found = training.check()
    assert found["in_every_step"] == ["finite_norms", "norm_of_clipped_sum"]
    assert [each["checks"] for each in found["situations"]] == [{}]


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_training_in_a_mode_of_opacus(mode: str) -> None:
    training = Training(nn.Linear(5, 3), mode, check="sometimes")
    for _ in range(6):
        training.step()
    found = training.check()
    assert (found["mode"], found["steps"], found["not_private"]["refused"], found["situations"]) == (mode, 6, 0, [])
    assert {what: numbers(spans) for what, spans in found["checked_steps"].items()} == {
        "mixing": [1, 2, 4],
        "clipped_sum": [1, 2, 4],
    }


def test_a_mode_of_opacus_that_was_refused() -> None:
    training = Training(Mixing(), "hooks", check="first")
    with pytest.raises(MemprofError, match="influence one another") as refusal:
        training.step()
    found = training.check()
    assert (found["steps"], found["not_private"]["refused"], found["checked_steps"]) == (0, 1, {})
    assert found["not_private"]["refusals"][0]["reason"] == str(refusal.value)


def test_a_mode_of_opacus_without_checks() -> None:
    training = Training(nn.Linear(5, 3), "hooks")
    training.step()
    found = training.check()
    assert (found["check"], found["steps"], found["checked_steps"]) == ("off", None, {})


def test_the_mode_that_auto_has_chosen_is_named() -> None:
    assert Training(nn.Linear(5, 3), "auto").check()["mode"] == "flash_clip"


def test_two_models_of_one_engine() -> None:
    training = Training(nn.Linear(5, 3))
    other = nn.Linear(5, 2)
    loader = DataLoader(TensorDataset(training.data[0]), batch_size=4)
    training.engine.make_private(
        module=other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=2.0,
    )
    assert [each["mode"] for each in training.engine.privacy_check()["models"]] == ["flash_clip", "hooks"]


def test_before_make_private_there_is_nothing(tmp_path: Path) -> None:
    engine = opacus_memprof.PrivacyEngine()
    with pytest.raises(MemprofError, match="call make_private before"):
        engine.privacy_check()
    with pytest.raises(MemprofError, match="call make_private before"):
        engine.save_privacy_check(tmp_path / PRIVACY_CHECK)
    engine.save_checkpoint(path=tmp_path / "model.pt", module=nn.Linear(1, 1))
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]


def test_it_is_written_beside_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    training = Training(nn.Linear(5, 3))
    training.step()
    training.engine.save_checkpoint(path=path, module=training.model, optimizer=training.optimizer)
    first = json.loads((tmp_path / PRIVACY_CHECK).read_text())
    validate(first)
    assert first == json.loads(json.dumps(training.engine.privacy_check()))
    for steps in (2, 3):
        training = Training(nn.Linear(5, 3))
        training.engine.load_checkpoint(path=path, module=training.model, optimizer=training.optimizer)
        for _ in range(steps):
            training.step()
        training.engine.save_checkpoint(path=path, module=training.model, optimizer=training.optimizer)
    last = json.loads((tmp_path / PRIVACY_CHECK).read_text())
    validate(last)
    assert [each["models"][0]["steps"] for each in [*last["earlier"], last]] == [1, 2, 3]
    assert last["earlier"][0] == first
    training.engine.load_checkpoint(path=path, module=training.model, optimizer=training.optimizer)  # goes back
    assert [each["models"][0]["steps"] for each in training.engine.privacy_check()["earlier"]] == [1, 2]


def test_beside_a_file_object_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(nn.Linear(5, 3))
    buffer = io.BytesIO()
    training.engine.save_checkpoint(path=buffer, module=training.model)
    assert list(tmp_path.iterdir()) == []
    buffer.seek(0)
    training.engine.load_checkpoint(path=buffer, module=training.model)


def test_a_session_writes_it_at_its_end(tmp_path: Path) -> None:
    with directory_of_session(tmp_path / "profile") as directory:
        training = Training(nn.Linear(5, 3))
        training.step()
    written = json.loads((directory / PRIVACY_CHECK).read_text())
    validate(written)
    assert written == json.loads(json.dumps(training.engine.privacy_check()))
    with directory_of_session(directory):  # a profile without a private model replaces it
        pass
    assert not (directory / PRIVACY_CHECK).exists()


def test_a_session_keeps_no_engine_alive(tmp_path: Path) -> None:
    """Its data set may be in the device's memory."""
    with directory_of_session(tmp_path / "profile") as directory:
        training = Training(nn.Linear(5, 3))
        training.step()
        engine, data = weakref.ref(training.engine), weakref.ref(training.loader.dataset)
        del training
        gc.collect()
        assert (engine(), data()) == (None, None)
    assert json.loads((directory / PRIVACY_CHECK).read_text())["models"][0]["steps"] == 1


def test_a_session_that_ends_with_a_refusal_writes_it(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="samples"), directory_of_session(tmp_path / "profile") as directory:
        Training(Mixing()).step()
    (model,) = json.loads((directory / PRIVACY_CHECK).read_text())["models"]
    assert (model["steps"], model["not_private"]["refused"]) == (0, 1)


def test_the_first_of_several_ranks_writes_it(tmp_path: Path) -> None:
    command = [*interpreter(), str(RANKS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*.json")) == [
        "ddp/rank_0/privacy_check.json",
        "fsdp2/rank_0/privacy_check.json",
    ]
    for wrap, sums in (("ddp", True), ("fsdp2", False)):  # sums of shards are not compared with autograd's
        content = json.loads((tmp_path / wrap / "rank_0" / PRIVACY_CHECK).read_text())
        validate(content)
        assert (content["rank"], content["world_size"]) == (0, 2)
        (model,) = content["models"]
        assert (model["steps"], model["not_private"]["refused"]) == (2, 1)
        assert ("sums" in model["situations"][0]["checks"]) == sums
        (refusal,) = model["not_private"]["refusals"]
        assert refusal["reason"].startswith("rank 1 could not take this step")
