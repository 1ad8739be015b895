# SPDX-License-Identifier: Apache-2.0
"""Every finding is planted in a real training on the CPU and found with its bytes; the same training without the
defect has none."""

import contextlib
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opacus.optimizers.optimizer
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof import _native
from opacus_memprof.analysis.profile import load_profile

FLOAT = 4
BATCH = 4


@pytest.fixture(autouse=True)
def no_remains() -> Iterator[None]:
    """Also where a test has failed: its session ends, and what it has captured does not reach the next test."""
    gc.collect()
    yield
    if (left := opacus_memprof.session.current()) is not None:
        left.close()
    for module, count in _native.captures().items():
        for _ in range(count):
            _native.release(module)
    gc.collect()


class Training:
    """A model made private, and a step on a batch of the given shape; the loss is a mean over all outputs."""

    def __init__(
        self, model: nn.Module, mode: str = "hooks", noise: float = 1.0, optimizer: Any = torch.optim.SGD
    ) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        data = DataLoader(TensorDataset(torch.zeros(BATCH, 1)), batch_size=BATCH)
        options: dict[str, Any] = {"criterion": PerSample()} if mode == "ghost" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, *rest = opacus_memprof.PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer(self.trained, lr=0.1),
                data_loader=data,
                noise_multiplier=noise,
                max_grad_norm=1.0,
                poisson_sampling=False,
                grad_sample_mode=mode,
                **options,
            )
        self.criterion = rest[0] if mode == "ghost" else PerSample()

    def step(self, x: torch.Tensor) -> None:
        self.criterion(self.model(x), torch.zeros(len(x))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class PerSample(nn.Module):
    """The mean of each sample's outputs, then the reduction over samples."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = output.flatten(1).square().mean(1) - target
        return losses if self.reduction == "none" else losses.mean()


def profiled(directory: Path, run: Any, error: type[Exception] | None = None) -> dict[str, Any]:
    """The profile of `run(session)`, which raises `error`."""
    expected = pytest.raises(error) if error else contextlib.nullcontext()
    with expected, opacus_memprof.profile(directory, device="cpu") as session:
        session.attach(PrivacyEngine)
        run(session)
    return load_profile(directory)


def of_kind(profile: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [finding for finding in profile["findings"] if finding["kind"] == kind]


def kinds(profile: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in profile["findings"]}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def drop_gradients(training: Training) -> None:
    """The remedy for discarded gradients."""
    for p in training.trained:
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


# --- activations that are never used ---


def test_forwards_without_backward(tmp_path: Path) -> None:
    """Twelve batches evaluated in train mode with gradients on. Each forward leaves the first ReLU's output, which the
    second Linear captured; the batch itself, which the first one captured, counts as inputs."""

    def run(session: Any) -> None:
        training = Training(mlp())
        for _ in range(12):
            training.model(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run)
    (found,) = of_kind(profile, "captures_without_backward")
    looked_at = found["captures"]["2"]
    assert 2 <= looked_at <= 12
    assert found["captures"] == {"0": looked_at, "2": looked_at}
    assert found["bytes"] == looked_at * BATCH * 16 * FLOAT
    assert found["modules"] == {"1": found["bytes"]}  # who made them
    assert found["module"] == ""
    assert "torch.no_grad()" in found["remedy"]
    assert "checkpoint_captures" not in kinds(profile)


def test_one_stray_forward_makes_the_step_fail(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        training = Training(mlp())
        training.model(torch.randn(BATCH, 8))
        training.step(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run, ValueError)
    (found,) = of_kind(profile, "captures_without_backward")
    assert found["captures"] == {"0": 1, "2": 1}
    assert found["bytes"] == BATCH * 16 * FLOAT
    assert "the step failed" in found["evidence"]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block, self.reentrant = nn.Linear(8, 8), mlp(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def test_checkpointing_that_leaks_captures(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Checkpointed(reentrant=False)).step(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run, ValueError)
    (found,) = of_kind(profile, "checkpoint_captures")
    # The repetition stops once it has what the backward needs: the block's last module captures once, the first twice.
    assert found["captures"] == {"block.0": 1}
    assert found["bytes"] == BATCH * 8 * FLOAT  # its input
    assert found["modules"] == {"stem": found["bytes"]}
    assert found["module"] == "block.0"
    assert "use_reentrant=True" in found["remedy"]


@pytest.mark.parametrize("steps", [1, 5])
def test_checkpointing_that_works(tmp_path: Path, steps: int) -> None:
    def run(session: Any) -> None:
        training = Training(Checkpointed(reentrant=True))
        drop_gradients(training)
        for _ in range(steps):
            training.step(torch.randn(BATCH, 8))

    profile = profiled(tmp_path, run)
    assert not {"checkpoint_captures", "captures_without_backward"} & kinds(profile)


def test_forwards_that_share_a_backward_are_none(tmp_path: Path) -> None:
    """Four forwards, one backward through all of them, in each step."""

    def run(session: Any) -> None:
        training = Training(mlp())
        for _ in range(3):
            outputs = [training.model(torch.randn(BATCH, 8)) for _ in range(4)]
            torch.stack(outputs).mean().backward()
            training.optimizer.zero_grad()

    assert not of_kind(profiled(tmp_path, run), "captures_without_backward")


# --- gradients and noise ---


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
        assert [(one["module"], one["bytes"]) for one in found] == [("mixed", 2 * BATCH * 24 * 16 * FLOAT)]
        assert f"{2 * BATCH} samples" in found[0]["evidence"]
    else:
        assert found == []


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

    def mended(session: Any) -> None:
        training = Training(mlp(), noise=0.0)
        drop_gradients(training)
        training.step(torch.randn(1, 8))
        parameters["mended"] = [p.detach().clone() for p in training.trained]

    profile = profiled(tmp_path / "mended", mended)
    assert "discarded_gradients" not in kinds(profile)
    assert all(map(torch.equal, parameters["as it is"], parameters["mended"]))


@pytest.mark.parametrize("mode", ["ghost", "flash_clip"])
def test_gradients_that_are_used(tmp_path: Path, mode: str) -> None:
    def run(session: Any) -> None:
        training = Training(mlp(), mode)
        for _ in range(3):
            training.step(torch.randn(1, 8))

    assert "discarded_gradients" not in kinds(profiled(tmp_path, run))


def big_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1000, bias=False))


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


# --- ghost clipping ---


class Sequence(nn.Module):
    """One Linear over tokens, with an in-place change of shape before it."""

    def __init__(self, d: int = 3, p: int = 5, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(d, p, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("bias", "matrices"), [(True, 3), (False, 2)])
def test_matrices_of_tokens_by_tokens(tmp_path: Path, bias: bool, matrices: int) -> None:
    tokens = 40

    def run(session: Any) -> None:
        training = Training(Sequence(bias=bias), "ghost")
        training.step(torch.randn(BATCH, tokens, 3))

    profile = profiled(tmp_path, run)
    (found,) = of_kind(profile, "ghost_matrices")
    assert found["module"] == "layer"
    assert found["bytes"] == matrices * FLOAT * BATCH * tokens**2
    assert found["gradient_bytes"] == FLOAT * BATCH * (5 * 3 + 5 * bias)
    # They are the peak, and the replay of the events has as many.
    assert profile["devices"]["cpu"]["peak"]["modules"]["layer"]["temp_matrices"] >= found["bytes"]
    assert "flash_clip" in found["remedy"]


def test_matrices_of_many_layers_are_one_finding(tmp_path: Path) -> None:
    tokens = 40

    def run(session: Any) -> None:
        model = nn.Sequential(Sequence(3, 5), Sequence(5, 4, bias=False), Sequence(4, 3))
        Training(model, "ghost").step(torch.randn(BATCH, tokens, 3))

    (found,) = of_kind(profiled(tmp_path, run), "ghost_matrices")
    matrix = FLOAT * BATCH * tokens**2
    assert found["module"] == ""
    assert found["modules"] == {"0.layer": 3 * matrix, "1.layer": 2 * matrix, "2.layer": 3 * matrix}
    assert found["bytes"] == 3 * matrix  # of the largest, since they do not live together
    assert "2 more layers" in found["evidence"]


def test_matrices_that_are_worth_it(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Sequence(30, 40), "ghost").step(torch.randn(BATCH, 10, 30))

    assert not {"ghost_matrices", "stale_norm_samples"} & kinds(profiled(tmp_path, run))


def test_norms_that_are_stale(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        training = Training(Sequence(), "ghost")
        training.step(torch.randn(BATCH, 6, 3))
        training.step(torch.randn(BATCH, 2, 3, 3))

    (found,) = of_kind(profiled(tmp_path, run), "stale_norm_samples")
    assert found["module"] == "layer"
    assert found["bytes"] == 2 * BATCH * FLOAT  # weight and bias
    assert "4 dimensions" in found["evidence"]
    assert "an earlier batch's" in found["evidence"]


def test_norms_that_are_missing(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        Training(Sequence(), "ghost").step(torch.randn(BATCH, 2, 3, 3))

    profile = profiled(tmp_path, run, AttributeError)
    (found,) = of_kind(profile, "stale_norm_samples")
    assert found["bytes"] == 0
    assert "it has none" in found["evidence"]


# --- growth ---


def train(steps: int, model: nn.Module, mode: str, keep: Any = lambda output, step: None) -> Any:
    """Batches of varying size; Adam makes its states in the first step."""

    def run(session: Any) -> None:
        training = Training(model, mode, optimizer=torch.optim.Adam)
        sizes = torch.randint(1, 2 * BATCH, (steps,), generator=torch.Generator().manual_seed(5)).tolist()
        for step, size in enumerate(sizes):
            training.step(torch.randn(size, 8))
            keep(training.model, step)

    return run


def test_memory_that_grows(tmp_path: Path) -> None:
    kept = []
    profile = profiled(tmp_path, train(12, mlp(), "hooks", lambda model, step: kept.append(torch.zeros(200))))
    (found,) = of_kind(profile, "growing_memory")
    assert found["bytes"] == 8 * 200 * FLOAT  # of steps 2 to 9; the first and last two are left out
    assert found["category"] == "unattributed"
    assert "steps 2 to 9" in found["evidence"]
    assert "end of step 11" in found["evidence"]


def test_graphs_that_are_kept(tmp_path: Path) -> None:
    losses = []

    def keep(model: nn.Module, step: int) -> None:
        with torch.enable_grad():
            model.eval()
            losses.append(model(torch.randn(BATCH, 8)).mean())
            model.train()

    profile = profiled(tmp_path, train(12, mlp(), "hooks", keep))
    found = {one["category"]: one for one in of_kind(profile, "growing_memory")}
    assert "loss.detach()" in found["activations"]["remedy"]
    # The ReLU's output of each step, which its own backward and the second Linear's share.
    assert found["activations"]["modules"]["1"] == 8 * BATCH * 16 * FLOAT
    losses.clear()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_steady_training_has_no_findings_but_the_inherent(tmp_path: Path, mode: str) -> None:
    """What every run of Opacus wastes may be found; nothing else is."""
    profile = profiled(tmp_path, train(16, mlp(), mode))
    assert kinds(profile) <= {"discarded_gradients", "noise_allocated_twice"}


def test_a_clean_run_has_none(tmp_path: Path) -> None:
    """Training in the mode hooks, with larger batches and without what autograd makes in vain."""

    def run(session: Any) -> None:
        training = Training(mlp())
        drop_gradients(training)
        for size in (32, 24, 40, 31, 8, 33, 40, 12, 20):
            training.step(torch.randn(size, 8))
            with torch.no_grad():
                training.model(torch.randn(64, 8))

    assert profiled(tmp_path, run)["findings"] == []


def test_an_earlier_session_leaves_nothing(tmp_path: Path) -> None:
    def run(session: Any) -> None:
        training = Training(mlp())
        for _ in range(5):
            training.model(torch.randn(BATCH, 8))

    assert of_kind(profiled(tmp_path / "leaky", run), "captures_without_backward")

    def clean(session: Any) -> None:
        training = Training(mlp())
        drop_gradients(training)
        for _ in range(4):
            training.step(torch.randn(32, 8))

    assert profiled(tmp_path / "clean", clean)["findings"] == []
