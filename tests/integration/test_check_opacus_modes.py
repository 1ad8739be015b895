# SPDX-License-Identifier: Apache-2.0
"""check= with Opacus' modes: a step is exact, or it is refused before anything has changed."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.clipping.arguments import is_checked
from opacus_memprof.clipping.proof.by_hand import exchanges
from opacus_memprof.errors import MemprofError

MODES = ["hooks", "functorch", "ew", "ghost"]


class Dropped(nn.Module):
    """Draws random numbers in ways that leave the global functions of dropout alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        kept = torch.rand(len(x), 1) < 0.7  # stochastic depth of each sample
        noise = -torch.log(-torch.log(torch.rand_like(h)))  # Gumbel
        output: torch.Tensor = self.second(h * kept + 0.1 * noise)
        return output


class Centered(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self, strength: float = 1.0, draws: bool = False) -> None:
        super().__init__()
        self.strength, self.draws = strength, draws
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.draws:
            h = h * torch.rand_like(h)
        output: torch.Tensor = self.second(h - self.strength * h.detach().mean(0))
        return output


class Permuted(nn.Module):
    """A 2x2 convolution of stride 2 of a permuted view, which Opacus' sampler gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(3), nn.Conv2d(3, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.conv(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean((2, 3))
        return output


class Scalar(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x).square().mean()
        return output


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def make_private(
    model: nn.Module, mode: str, check: Any = "always", shape: tuple[int, ...] = (5,), **given: Any
) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(12, *shape), torch.randint(3, (12,)))
    return opacus_memprof.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6),
        **{
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.3,
            "poisson_sampling": False,
            "grad_sample_mode": mode,
            "check": check,
            **given,
        },
    )


def train(prepared: Any, before_step: Callable[[], None] = lambda: None, steps: int = 2) -> None:
    module, optimizer, *criterion, loader = prepared
    compute = criterion[0] if criterion else nn.CrossEntropyLoss()
    for x, y in list(loader)[:steps]:
        optimizer.zero_grad()
        compute(module(x), y).backward()
        before_step()
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [mlp, Dropped])
def test_exact_steps_pass_and_training_is_the_same(mode: str, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    results = []
    for check in ("always", "off"):
        copied = copy.deepcopy(model)
        prepared = make_private(copied, mode, check, noise_generator=torch.Generator().manual_seed(3))
        torch.manual_seed(2)
        train(prepared)
        results.append([*copied.parameters(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize(
    ("clipping", "bound"), [("per_layer", [0.1, 0.2, 0.3, 0.4]), ("adaptive", 0.3)], ids=["per_layer", "adaptive"]
)
def test_other_rules(mode: str, clipping: str, bound: Any) -> None:
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 4.0,
    }
    options = adaptive if clipping == "adaptive" else {}
    train(make_private(mlp(), mode, max_grad_norm=bound, clipping=clipping, **options))


def test_a_bound_that_moves_without_its_list() -> None:
    prepared = make_private(mlp(), "hooks", max_grad_norm=[0.1, 0.2, 0.3, 0.4], clipping="per_layer")
    train(prepared, steps=1)
    prepared[1].max_grad_norm *= 0.5  # as a clip scheduler of Opacus does
    with pytest.raises(MemprofError, match=r"max_grad_norm=0.273861, but clipping='per_layer' clips to .* 0.547723"):
        train(prepared, steps=1)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_samples_that_are_given_twice(mode: str) -> None:
    """Each backward pass clips them anew, so that they count twice. Other samples may have equal inputs."""
    module, optimizer, loader = make_private(mlp(), mode)
    x, _ = next(iter(loader))
    for given in (x.clone(), x):
        for each in (x, given):
            module(each).square().mean().backward()
        with pytest.raises(MemprofError, match="given the same samples") if given is x else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_mixing_is_refused_and_nothing_changes(mode: str, draws: bool, strength: float) -> None:
    torch.manual_seed(0)
    model = Centered(strength, draws)
    generator = torch.Generator().manual_seed(3)
    prepared = make_private(model, mode, noise_generator=generator)
    before, state = copy.deepcopy(model.state_dict()), generator.get_state()
    with pytest.raises(MemprofError, match="samples of a batch influence one another in Centered"):
        train(prepared, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(generator.get_state(), state)
    assert all(p.summed_grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch"])
def test_a_sampler_of_opacus_that_is_wrong(mode: str) -> None:
    torch.manual_seed(0)
    prepared = make_private(Permuted(), mode, shape=(3, 4, 4), max_grad_norm=0.05)
    if mode == "functorch":
        train(prepared)
        return
    with pytest.raises(
        MemprofError, match=r"clipped gradient of (conv|norm)[.a-z]* differs by .* from clipping by hand"
    ):
        train(prepared, steps=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_sum_is_refused_at_checked_steps_only(mode: str) -> None:
    for check, fails_at in (("first", 1), ("sometimes", 4), ("always", 3)):
        model = mlp()
        module, optimizer, *criterion, loader = make_private(model, mode, check)
        compute = criterion[0] if criterion else nn.CrossEntropyLoss()
        x, y = next(iter(loader))
        for step in range(1, fails_at + 1):
            optimizer.zero_grad()
            compute(module(x), y).backward()
            if step == fails_at or (check == "sometimes" and step == 3):
                kind = "grad" if mode == "ghost" else "grad_sample"
                last = model[2].weight
                setattr(last, kind, 1.01 * getattr(last, kind))
            if step < fails_at:
                optimizer.step()
        history = list(optimizer.step_hook.__self__.history) if hasattr(optimizer.step_hook, "__self__") else None
        with pytest.raises(MemprofError, match=f"{mode!r} does not clip .* in step {fails_at} the clipped gradient of"):
            optimizer.step()
        assert history is None or list(optimizer.step_hook.__self__.history) == history


def test_every_ordered_pair_of_samples_is_told_apart() -> None:
    for size in range(2, 18):
        told = {(i, j) for kept, rows in exchanges(size) for i in kept for j in range(size) if rows[j] != j}
        assert told == {(i, j) for i in range(size) for j in range(size) if i != j}


def test_ghost_with_accumulation_is_refused() -> None:
    """Opacus zeroes the gradients of earlier micro-batches (issue 683)."""
    module, optimizer, criterion, loader = make_private(mlp(), "ghost")
    optimizer.zero_grad()
    for x, y in loader:
        criterion(module(x), y).backward()
    with pytest.raises(MemprofError, match="'ghost' does not clip this model exactly: in step 1"):
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_batches_in_parts(mode: str) -> None:
    module, optimizer, *criterion, loader = make_private(mlp(), mode)
    compute = criterion[0] if criterion else nn.CrossEntropyLoss()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
        for x, y in parts:
            optimizer.zero_grad()
            compute(module(x), y).backward()
            optimizer.step()


def test_accumulation_and_dropped_gradients() -> None:
    module, optimizer, loader = make_private(mlp(), "hooks")
    (x, y), (x2, y2) = loader
    loss = nn.CrossEntropyLoss()
    loss(module(x), y).backward()
    optimizer.zero_grad()  # drops them
    with torch.no_grad():
        module(x)
    loss(module(x), y).backward()
    loss(module(x2), y2).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_empty_batches_of_poisson_sampling(mode: str) -> None:
    torch.manual_seed(0)
    module, optimizer, *criterion, _ = make_private(mlp(), mode)
    compute = criterion[0] if criterion else nn.CrossEntropyLoss(reduction="sum")
    compute(module(torch.zeros(0, 5)), torch.zeros(0, dtype=torch.int64)).backward()
    optimizer.step()


@pytest.mark.parametrize("wrap_model", [True, False])
def test_without_a_wrapper(wrap_model: bool) -> None:
    model = mlp()
    returned, optimizer, loader = make_private(model, "hooks", wrap_model=wrap_model)
    train((returned if wrap_model else model, optimizer, loader))


def test_what_cannot_be_certified() -> None:
    module, optimizer, loader = make_private(Scalar(), "hooks")
    module(next(iter(loader))[0]).backward()
    with pytest.raises(MemprofError, match=r"Scalar: the loss depends on an output of shape \[\], whose first"):
        optimizer.step()
    model = mlp()
    with pytest.raises(MemprofError, match="check='first' needs batch_first=True"):
        make_private(model, "hooks", "first", batch_first=False)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("wrap_model", [True, False])
def test_cleanup_leaves_nothing_on_the_model(wrap_model: bool) -> None:
    model = mlp()
    prepared = make_private(model, "hooks", wrap_model=wrap_model)
    prepared[0].cleanup()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("mode", MODES)
def test_copies_of_the_model_are_not_checked(mode: str) -> None:
    module, optimizer, *rest = make_private(mlp(), mode)
    teacher = copy.deepcopy(module._module).requires_grad_(False)
    (criterion,) = rest[:-1] or (nn.CrossEntropyLoss(),)
    for x, y in rest[-1]:
        optimizer.zero_grad()
        with torch.no_grad():
            shift = teacher(x)
        criterion(module(x) - shift, y).backward()
        optimizer.step()
    copied = copy.deepcopy(module)
    copied.remove_hooks()
    assert not any(each._forward_pre_hooks for each in copied._module[0].modules())
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    with torch.no_grad():
        module._module[2].weight.mul_(1.5)
    with pytest.raises(MemprofError, match="does not clip this model exactly"):  # the original is still checked
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strength", [1e-3, 1.0])
def test_a_penalty_that_the_mode_leaves_out_is_refused(mode: str, strength: float) -> None:
    model = mlp()
    module, optimizer, *rest = make_private(model, mode, wrap_model=True)
    (criterion,) = rest[:-1] or (nn.CrossEntropyLoss(),)
    x, y = next(iter(rest[-1]))
    optimizer.zero_grad()
    (criterion(module(x), y) + strength * model[2].weight.square().sum()).backward()
    does = (
        "does not clip this model exactly: in"
        if mode == "ghost"
        else "leaves out a part of the gradient of 2.weight in"
    )
    with pytest.raises(MemprofError, match=f"'{mode}' {does} step 1"):
        optimizer.step()
    assert not model[2].weight._backward_hooks


def test_auto_checks_what_it_falls_back_to() -> None:
    refused = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 3))
    module, optimizer, _ = make_private(refused, "auto", None)
    nn.CrossEntropyLoss()(module(torch.randint(5, (6, 2))), torch.randint(3, (6,))).backward()
    with torch.no_grad():
        refused[2].weight.grad_sample *= 1.1
    with pytest.raises(MemprofError, match="'hooks' does not clip this model exactly"):
        optimizer.step()


def test_a_gradient_that_is_not_finite() -> None:
    module, optimizer, loader = make_private(mlp(), "hooks")
    x, y = next(iter(loader))
    nn.CrossEntropyLoss()(module(x * torch.tensor(float("nan"))), y).backward()
    with pytest.raises(MemprofError, match="step 1 cannot be checked: a sample's gradient has NaN or infinite"):
        optimizer.step()


def test_the_schedule() -> None:
    sometimes = [step for step in range(1, 5001) if is_checked("sometimes", step)]
    assert sometimes == [*(2**i for i in range(11)), 2000, 3000, 4000, 5000]
    assert [step for step in range(1, 50) if is_checked("first", step)] == [1]
    assert all(is_checked("always", step) for step in range(1, 50))
    assert not any(is_checked("off", step) for step in range(1, 50))
