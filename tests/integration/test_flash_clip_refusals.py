# SPDX-License-Identifier: Apache-2.0
"""What flash_clip cannot clip exactly it refuses in a sentence, before any parameter has changed."""

import contextlib
import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip
from opacus_memprof.errors import MemprofError
from tests.exactness.programs.graph_hooks import _entropy, _Features, _with_loss
from tests.exactness.programs.left import _batches, _run
from tests.integration.flash_clip_models import (
    assert_same,
    criterion,
    make_private,
    mlp,
    parameters,
    vector_data,
)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


REFUSED_MODELS: list[tuple[Callable[[], nn.Module], str, str]] = [
    (lambda: nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4)), "layer '1' (BatchNorm1d)", "GroupNorm"),
    (lambda: nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(9, 4)), "InstanceNorm", "eval()"),
    (lambda: nn.Embedding(5, 3, max_norm=1.0), "max_norm", "without"),
    (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq", "without"),
    (lambda: nn.Embedding(5, 3, sparse=True), "sparse", "without"),
    (lambda: mlp().eval(), "training mode", "train()"),
]


@pytest.mark.parametrize(("build", "named", "advice"), REFUSED_MODELS, ids=[named for _, named, _ in REFUSED_MODELS])
def test_models_are_refused_by_name(build: Callable[[], nn.Module], named: str, advice: str) -> None:
    model = build()
    with pytest.raises(MemprofError) as refusal:
        make_private(model, vector_data(8), "flash_clip")
    text = str(refusal.value)
    assert named in text
    assert advice in text
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_frozen_models_are_refused() -> None:
    model = frozen()
    with pytest.raises(MemprofError, match="no trainable parameter"):
        make_private(model, vector_data(8), "flash_clip", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_first": False}, "batch_first=True"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0]}, "has 1 bounds, but the optimizer has 3 parameters"),
        ({"clipping": "per_layer", "max_grad_norm": 1.0}, "list with one positive and finite number for each"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 3, "flash_clip_passes": 2}, "use 1 with 'per_layer'"),
        ({"clipping": "ghost"}, "flash_clip knows 'flat'"),
        ({"max_grad_norm": [1.0, 2.0]}, "one positive and finite number"),
        ({"max_grad_norm": 0.0}, "one positive and finite number"),
        ({"loss_reduction": "none"}, "'mean' or 'sum'"),
        ({"flash_clip_workspace_mb": 0}, "positive number of MiB"),
        ({"flash_clip_passes": 3}, "'auto', 1 or 2"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(MemprofError, match=message):
        make_private(model, vector_data(8), "flash_clip", **options)
    assert not any(m._forward_hooks for m in model.modules())


def test_the_optimizer_must_hold_all_trainable_parameters() -> None:
    model = mlp()
    with pytest.raises(MemprofError, match=r"2\.weight can be trained but the optimizer does not hold"):
        make_private(model, vector_data(8), "flash_clip", optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_optimizer_must_hold_no_other_parameters() -> None:
    module = GradSampleModuleFlashClip(mlp())
    parameters = [*module.parameters(), nn.Parameter(torch.zeros(2))]
    with pytest.raises(MemprofError, match="the optimizer holds 1 trained parameters that"):
        DPOptimizerFlashClip(
            torch.optim.SGD(parameters, lr=0.1),
            module=module,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
        )


@pytest.mark.parametrize(("cls", "advice"), [(torch.optim.LBFGS, "SGD or Adam"), (torch.optim.SparseAdam, "use Adam")])
def test_optimizers_that_need_other_gradients(cls: type[torch.optim.Optimizer], advice: str) -> None:
    model = mlp()
    with pytest.raises(MemprofError, match=f"{cls.__name__} .*{advice}"):
        make_private(model, vector_data(8), "flash_clip", optimizer=cls(model.parameters()))  # type: ignore[call-arg]
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_module_and_optimizer_have_the_same_reduction(reduction: str) -> None:
    model = mlp()
    module = GradSampleModuleFlashClip(model, loss_reduction=reduction)
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(MemprofError, match=f"'{other}' and its module '{reduction}': pass the same to both"):
        DPOptimizerFlashClip(
            torch.optim.SGD(model.parameters(), lr=0.1),
            module=module,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            loss_reduction=other,
        )


def test_a_sum_where_a_mean_is_declared() -> None:
    module, optimizer = private(nn.Linear(9, 4), 1)
    module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
    with pytest.warns(UserWarning, match="the loss is a sum over the samples, but loss_reduction='mean' was declared"):
        optimizer.step()


@pytest.mark.nightly
@pytest.mark.parametrize("by_batch", [False, True])
def test_a_condition_that_is_compiled(by_batch: bool) -> None:
    """torch.cond compiles its branches, which cannot run otherwise."""

    class Branches(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            condition = x.mean() > 0 if by_batch else torch.tensor(True)
            y: torch.Tensor = torch.cond(condition, torch.sin, torch.cos, (x,))
            return y

    torch.manual_seed(0)  # of means that are on both sides of 0
    module = GradSampleModuleFlashClip(Branches(nn.Linear(3, 4)))
    with (
        pytest.raises(MemprofError, match=r"changes for a sample when|mixes the 3 samples")
        if by_batch
        else contextlib.nullcontext()
    ):
        module(torch.randn(6, 3)).sum().backward()


def test_a_state_with_the_batch_second() -> None:
    class Recurrent(nn.GRU):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y: torch.Tensor = super().forward(x, state)[0]
            return y

    module = GradSampleModuleFlashClip(Recurrent(3, 4, batch_first=True))
    with pytest.raises(MemprofError, match=r"shape \(1, 6, 4\), with the batch second, is passed as state.transpose"):
        module(torch.randn(6, 5, 3), torch.zeros(1, 6, 4)).sum().backward()


def test_offsets_of_bags() -> None:
    class Bags(nn.EmbeddingBag):
        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            bags: torch.Tensor = super().forward(ids, offsets)
            return bags

    module = GradSampleModuleFlashClip(Bags(9, 4))
    with pytest.raises(MemprofError, match=r"pass the model ids of shape \[B, T\] that are padded, with the lengths"):
        module(torch.arange(9), torch.tensor([0, 2, 5])).sum().backward()


class Faulty(nn.Module):
    """Can be told to mix samples in its forward, or to keep a term of the loss beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 6), nn.Linear(6, 4)
        self.fault, self.beside = "", torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        self.beside = h.square().mean() if self.fault == "beside" else torch.zeros(())
        out: torch.Tensor = self.last(h - h.mean(0) if self.fault == "forward" else h)
        return out


def _fed_back(out: torch.Tensor, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mixed: torch.Tensor = module(x * out.mean().item())
    return mixed


class ProgramError(Exception):
    """Of the program itself."""


def _raise(out: torch.Tensor, *_: Any) -> torch.Tensor:
    raise ProgramError


_FAULTS: dict[str, Callable[..., torch.Tensor]] = {
    "forward": lambda out, *_: out.sum(),
    "beside": lambda out, module, x: out.sum() + module._module.beside,
    "next call": lambda out, module, x: _fed_back(out, module, x).sum(),
    "loss": lambda out, *_: out.square().sum().sqrt(),
    "labels": lambda out, module, x: (out.square().sum(1) * LABELS).sum() / LABELS.sum(),
    "backward": lambda out, module, x: out.sum() + module(x[:3]).sum(),
    "norms": lambda out, *_: out.sum() * torch.inf,
    "own": _raise,
}
LABELS = torch.tensor([0, 1, 1, 3, 0, 2])


@pytest.mark.parametrize("clears_late", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
def test_steps_after_a_refused_one(fault: str, clears_late: bool) -> None:
    """They are exact, and the same fault is refused again."""
    model = Faulty().double()
    module = GradSampleModuleFlashClip(model, loss_reduction="sum")
    optimizer = DPOptimizerFlashClip(
        torch.optim.SGD(model.parameters(), lr=0.1),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    for _ in range(3):
        x = torch.randn(6, 9, dtype=torch.float64)
        before = parameters(module)
        model.fault = fault
        with pytest.raises((MemprofError, ProgramError)):
            _faulty_step(fault, module, optimizer, x)
        for name, kept in model.state_dict().items():  # as a program looks for what has changed
            assert torch.equal(kept, before[name])
            assert float(kept.sum()) < 1e3
        model.fault = ""
        if not clears_late:
            optimizer.zero_grad()
        loss = module(x).square().sum()
        if clears_late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same(found, clipped_sums(before, x), 1e-12)
        optimizer.zero_grad()


@pytest.mark.parametrize("mean", ["0.375", "0.05832", "0.05832002", "0.0583200153"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_mean_that_is_read_scales_the_next_call(mean: str, dtype: torch.dtype) -> None:
    """It is refused even where the mean has few digits, as the numbers of programs have."""
    module = GradSampleModuleFlashClip(nn.Linear(1, 1, bias=False).to(dtype), loss_reduction="sum")
    nn.init.ones_(next(module.parameters()))
    x = torch.tensor([[-1.0], [0.25], [0.5], [-0.25], [0.0], [0.5]], dtype=dtype) + float(mean)
    scale = module(x).mean().item()
    assert scale == pytest.approx(float(mean), rel=1e-6)
    with pytest.raises(MemprofError, match="number"):
        module(x * scale).sum().backward()


@pytest.mark.parametrize("mean", ["0.05832002", "0.0583200153"])
def test_a_mean_of_the_step_before_scales_the_loss(mean: str) -> None:
    """It is refused even where the mean is nearly a number of few digits."""
    module = GradSampleModuleFlashClip(nn.Linear(1, 1, bias=False).double(), loss_reduction="sum")
    nn.init.ones_(next(module.parameters()))
    optimizer = DPOptimizerFlashClip(
        torch.optim.SGD(module.parameters(), lr=0.0),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=6,
        loss_reduction="sum",
    )

    def train(x: torch.Tensor, scale: float) -> float:
        optimizer.zero_grad()
        out = module(x)
        (out.square().sum() * scale).backward()
        optimizer.step()
        return float(out.mean().item())

    x = torch.tensor([[-1.0], [0.25], [0.5], [-0.25], [0.0], [0.5]], dtype=torch.float64) + float(mean)
    scale = train(x, 1.0)
    with pytest.raises(MemprofError, match="earlier step"):
        train(x.flip(0), scale)


def test_a_constant_scales_the_next_call() -> None:
    """It is accepted although a mean was read."""
    module = GradSampleModuleFlashClip(nn.Linear(1, 1, bias=False), loss_reduction="sum")
    nn.init.ones_(next(module.parameters()))
    x = torch.tensor([[-1.0], [0.25], [0.5], [-0.25], [0.0], [0.5]]) + 0.375
    assert module(x).mean().item() == 0.375
    module(x * 0.05832).sum().backward()


def _faulty_step(fault: str, module: Any, optimizer: Any, x: torch.Tensor) -> None:
    _FAULTS[fault](module(x), module, x).backward()
    optimizer.step()


def clipped_sums(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sums of each sample's gradient of the squared outputs, clipped to 1 by hand."""
    model = Faulty().double()
    model.load_state_dict(state)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for sample in x.split(1):
        gradients = torch.autograd.grad(model(sample).square().sum(), list(model.parameters()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total += gradient * (1 / (norm + 1e-6)).clamp(max=1)
    return sums


def test_a_batch_norm_that_is_switched_on_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].requires_grad_(False).eval()
    module = GradSampleModuleFlashClip(model)
    module(torch.randn(5, 3)).sum().backward()
    module.train()
    with pytest.raises(MemprofError, match=r"layer '1' \(BatchNorm1d\) computes statistics of the whole batch"):
        module(torch.randn(5, 3))


def test_models_that_are_private_already() -> None:
    module, _, _ = make_private(mlp(), vector_data(8), "flash_clip")
    with pytest.raises(MemprofError, match="made private already"):
        make_private(module, vector_data(8), "flash_clip")


@pytest.fixture(params=[1, 2])
def passes(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def private(model: nn.Module, passes: int, **options: Any) -> tuple[Any, Any]:
    module, optimizer, _ = make_private(
        model.double(), vector_data(8), "flash_clip", flash_clip_passes=passes, **options
    )
    return module, optimizer


@pytest.mark.parametrize(
    ("model", "shape"),
    [(lambda: nn.Linear(9, 4), (9,)), (lambda: nn.Conv2d(3, 4, 3), (3, 5, 5)), (lambda: nn.Conv1d(3, 4, 3), (3, 5))],
)
def test_inputs_without_a_batch(model: Callable[[], nn.Module], shape: tuple[int, ...], passes: int) -> None:
    module, _ = private(model(), passes)
    with pytest.raises(MemprofError, match="no batch dimension"):
        module(torch.randn(shape, dtype=torch.float64))
    assert all(p.requires_grad for p in module.parameters())


class Centered(nn.Module):
    """Subtracts the mean over the batch, as no layer type tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 9), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        out = self.last(out - out.mean(0))
        return out


def test_models_that_mix_samples(passes: int) -> None:
    module, _ = private(Centered(), passes)
    with pytest.raises(MemprofError, match="samples of the batch influence one another"):
        module(torch.randn(4, 9, dtype=torch.float64))
    assert all(p.requires_grad for p in module.parameters())


class Bags(nn.Module):
    """Takes indices and offsets, neither of which has the samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 9), nn.Linear(9, 3)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.bag(ids, offsets))
        return out


def test_inputs_that_are_not_by_sample(passes: int) -> None:
    module, _ = private(Bags(), passes)
    with pytest.raises(MemprofError, match="needs inputs whose first dimension is the batch"):
        module(torch.randint(0, 11, (9,)), torch.tensor([0, 3, 5]))
    assert all(p.requires_grad for p in module.parameters())


def test_several_forwards_for_one_backward_in_two_passes() -> None:
    module, _ = private(mlp(), 2)
    x = torch.randn(4, 9, dtype=torch.float64)
    with pytest.raises(MemprofError, match="need flash_clip_passes=1"):
        (module(x) + module(x)).sum().backward()


def test_several_forwards_of_other_samples_for_one_backward() -> None:
    module, _ = private(mlp(), 1)
    x = torch.randn(4, 9, dtype=torch.float64)
    with pytest.raises(MemprofError, match="saw a batch of 4, but other layers saw 3"):
        (module(x).sum() + module(x[:3]).sum()).backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])  # of which the square is too large
def test_norms_that_are_not_finite(passes: int, value: float) -> None:
    module, optimizer = private(nn.Linear(9, 2).double() if math.isfinite(value) else mlp(), passes)
    before = parameters(module)
    x = torch.randn(4, 9, dtype=torch.float64)
    x[2, 3] = value

    def step() -> None:
        module(x).sum().backward()
        optimizer.step()

    with pytest.raises(MemprofError, match=r"samples \[2\] of the batch is not finite"):
        step()
    assert_same(parameters(module), before, 0)
    assert all(p.summed_grad is None for p in module.parameters())
    module(x).sum().backward()
    optimizer.zero_grad()  # drops these norms, too
    module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in module.parameters())


def test_poisson_batches_do_not_accumulate(passes: int) -> None:
    module, _ = private(mlp(), passes, poisson_sampling=True)
    module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()


def test_gradients_must_be_cleared_between_steps(passes: int) -> None:
    module, optimizer = private(mlp(), passes)
    for attempt in range(2):
        module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
        if attempt:
            with pytest.raises(ValueError, match="zero_grad"):
                optimizer.step()
        else:
            optimizer.step()


def test_gradients_of_all_parameters_must_be_cleared() -> None:
    module, optimizer = private(mlp(), 1)
    x = torch.randn(4, 9, dtype=torch.float64)
    module(x).sum().backward()
    optimizer.step()
    optimizer.params[0].summed_grad = optimizer.params[0].grad = None
    module(x.clone()).sum().backward()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()


def test_steps_without_a_backward() -> None:
    _, optimizer = private(mlp(), 1)
    with pytest.raises(MemprofError, match="without a backward pass"):
        optimizer.step()


def test_layers_that_no_gradient_reaches(passes: int) -> None:
    model = mlp()
    model.register_module("unused", nn.Identity())
    model.unused.add_module("head", nn.Linear(3, 3))
    module, optimizer = private(model, passes)
    before = parameters(module)
    module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
    with pytest.raises(MemprofError, match=r"no gradient reached unused\.head\.weight, unused\.head\.bias"):
        optimizer.step()
    assert_same(parameters(module), before, 0)


def test_a_penalty_on_a_weight_is_refused_and_training_continues() -> None:
    module, optimizer = private(mlp(), 1)
    x, (weight, *_) = torch.randn(4, 9, dtype=torch.float64), module.parameters()
    (module(x).sum() + weight.square().sum()).backward()
    with pytest.raises(MemprofError, match="comes from outside of the layers"):
        optimizer.step()
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()


def test_two_passes_of_a_loss_in_the_model_equal_one() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.model(x).square().mean()
            return out

    model = WithLoss()
    x = torch.randn(4, 9, dtype=torch.float64)
    gradients = []
    for passes in (1, 2):
        module, optimizer = private(copy.deepcopy(model), passes, noise_multiplier=0.0)
        module(x).backward()
        optimizer.pre_step()
        gradients.append([p.grad for p in module.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(two, one)


def test_changed_inputs_are_noticed() -> None:
    module, _ = private(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 4)), 1)
    x = torch.randn(4, 9, dtype=torch.float64)
    loss = module(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_stay_trainable_when_a_forward_fails() -> None:
    module, _ = private(mlp(), 1)
    with pytest.raises(RuntimeError):
        module(torch.randn(4, 8, dtype=torch.float64))
    assert all(p.requires_grad for p in module.parameters())
    for _ in range(2):
        module(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError):  # in a third forward, which no proof precedes
        module(torch.randn(4, 8, dtype=torch.float64))
    assert all(p.requires_grad for p in module.parameters())


def test_gradients_of_gradients(passes: int) -> None:
    module, _ = private(mlp(), passes)
    loss = module(torch.randn(4, 9, dtype=torch.float64)).square().sum()
    with pytest.raises(MemprofError, match="with create_graph=True, but flash_clip has no second derivatives"):
        loss.backward(create_graph=True)


def test_gradient_given_to_backward_may_require_grad() -> None:
    module, optimizer = private(mlp(), 1)
    output = module(torch.randn(4, 9, dtype=torch.float64))
    output.backward(torch.ones_like(output).requires_grad_())
    optimizer.step()


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaled_loss_is_refused_and_training_goes_on(unscales: bool) -> None:
    module, optimizer, loader = make_private(mlp().double(), vector_data(8), "flash_clip")
    scaler = torch.amp.GradScaler("cpu")
    x, _ = next(iter(loader))
    before = parameters(module)
    scaler.scale(module(x).square().sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(MemprofError, match=r"GradScaler multiplies the loss .* in bfloat16 or float32"):
        scaler.step(optimizer)
    assert_same(parameters(module), before)
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(parameters(module)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("steps_between", [0, 1, 3])
@pytest.mark.parametrize("own_generator", [False, True])
def test_noise_that_repeats_is_refused_before_it_is_added(
    own_generator: bool, steps_between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator() if own_generator else None
    module, optimizer, _ = make_private(mlp().double(), vector_data(8), "flash_clip", noise_generator=generator)

    def step(seed: int) -> None:
        optimizer.zero_grad()
        torch.manual_seed(seed)
        if generator is not None:
            generator.manual_seed(seed)
        module(torch.ones(4, 9, dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    for seed in range(2 + steps_between):
        step(seed)
    before = parameters(module)
    with pytest.raises(MemprofError, match=r"those of an earlier step.*noise_generator"):
        step(1)
    assert_same(parameters(module), before)
    step(10)
    optimizer.noise_multiplier = 0.0
    for _ in range(2):
        step(11)
    optimizer.noise_multiplier = 0.5
    monkeypatch.setattr("opacus_memprof.clipping.kernels.sums._MOST_STATES", 2)
    for seed in (20, 21, 22, 20):  # the first one is forgotten by then
        step(seed)
    with pytest.raises(MemprofError, match="those of an earlier step"):
        step(20)


def test_noise_from_further_on_in_the_same_numbers_is_refused() -> None:
    """Dropout of a larger batch draws more numbers, so that the noise begins later in those of the same seed."""
    model = torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 3)).double()
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip", noise_generator=None)

    def step(size: int) -> None:
        optimizer.zero_grad()
        torch.manual_seed(3)
        module(torch.ones(size, 9, dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    step(4)
    with pytest.raises(MemprofError, match="those of an earlier step"):
        step(6)


def test_forwards_with_the_same_numbers_and_noise_with_others() -> None:
    module, optimizer, _ = make_private(mlp().double(), vector_data(8), "flash_clip", noise_generator=None)
    torch.manual_seed(3)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            output = module(torch.ones(4, 9, dtype=torch.float64))
        output.square().sum().backward()
        optimizer.step()


def test_a_warning_as_error_ends_a_step_before_anything_changes() -> None:
    module, optimizer, _ = make_private(mlp().double(), vector_data(8), "flash_clip", noise_generator=None)
    before, state = parameters(module), torch.get_rng_state()
    module(torch.randn(400, 9, dtype=torch.float64, generator=torch.Generator())).square().sum().backward()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="a step has clipped 400 samples"):
                optimizer.step()
        assert_same(parameters(module), before)
        assert torch.equal(state, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.warns(UserWarning, match="a step has clipped 400 samples"):
        optimizer.step()
    assert not torch.equal(parameters(module)["0.weight"], before["0.weight"])


def test_random_numbers_whose_amount_depends_on_data_are_named() -> None:
    torch.manual_seed(3)  # with other numbers, the first few samples may be refused before amounts are compared
    module, _ = private(nn.Sequential(nn.Linear(9, 3), nn.RReLU()).double(), 1)
    with pytest.raises(MemprofError, match=r"more or fewer random numbers for other data .* use nn\.LeakyReLU"):
        module(torch.randn(4, 9, dtype=torch.float64))


def test_a_parameter_that_changes_before_the_step_is_named() -> None:
    """As in sharpness-aware minimisation, where the ascent depends on the batch."""
    torch.manual_seed(0)
    model = mlp().double()
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip")
    x, target = vector_data(4).tensors
    criterion("mean")(module(x), target).backward()
    weight = next(model.parameters())
    with torch.no_grad():
        weight.mul_(1.5)
    name = next(name for name, _ in model.named_parameters())
    with pytest.raises(MemprofError, match=rf"^{name} changed between the model's forward and optimizer\.step\(\)"):
        optimizer.step()


def _mixing_hooks() -> contextlib.AbstractContextManager[None]:
    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(0) if x.is_floating_point() and x.shape[:1] == (4,) else x

    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack)


@pytest.mark.parametrize("begins", [0, 2, 4])
@pytest.mark.parametrize("mixes", [True, False])
def test_saved_tensors_hooks_that_change_gradients(begins: int, mixes: bool) -> None:
    torch.manual_seed(0)
    module, optimizer, _ = make_private(mlp().double(), vector_data(8), "flash_clip")
    x, target = vector_data(4).tensors
    for step in range(begins + 1):
        hooks = _mixing_hooks if mixes else torch.autograd.graph.save_on_cpu
        with hooks() if step == begins else contextlib.nullcontext():
            output = module(x)
        criterion("mean")(output, target).backward()
        refused = pytest.raises(MemprofError, match=r"hooks around the model change what .* \(_mixing_hooks\.")
        with refused if mixes and step == begins else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


class _Mode(TorchDispatchMode):
    """Counts operations and, if told, mixes the gradients of a batch of 4."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixes, self.count = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        out = func(*args, **(kwargs or {}))
        return out + self.mixes * out.mean(0) if "backward" in str(func) and out.shape[:1] == (4,) else out


@pytest.mark.parametrize("mixes_in", [0, 4, None])
def test_a_dispatch_mode_around_a_step(mixes_in: int | None) -> None:
    """Each step under it is explained, because it may change at any time."""
    torch.manual_seed(0)
    module, optimizer, _ = make_private(nn.Sequential(*mlp(), nn.Tanh()).double(), vector_data(8), "flash_clip")
    x, target = vector_data(4).tensors
    mode = _Mode()
    for step in range(6):
        mode.mixes = step == mixes_in
        with (
            pytest.raises(MemprofError, match=r"gradient .* off|^the loss of")
            if mode.mixes
            else contextlib.nullcontext()
        ):
            with mode:
                criterion("mean")(module(x), target).backward()
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("begins", [0, 4])
def test_a_dispatch_mode_around_backward_alone(begins: int) -> None:
    torch.manual_seed(0)
    module, optimizer, _ = make_private(mlp().double(), vector_data(8), "flash_clip")
    x, target = vector_data(4).tensors
    for step in range(begins + 1):
        loss = criterion("mean")(module(x), target)
        refused = pytest.raises(MemprofError, match=r"^backward.* under _Mode, which the model's call")
        with refused if step == begins else contextlib.nullcontext():
            with _Mode() if step == begins else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def test_modes_that_change_each_sample_alone() -> None:
    """The step is explained under the modes of the call, and its sums are formed under none."""

    class Halving(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out / 2 if func in (torch.nn.functional.linear, torch.addmm, torch.matmul) else out

    class HalvingProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out / 2 if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else out

    torch.manual_seed(0)
    model = mlp().double()
    x, target = vector_data(4).tensors
    for mode in (Halving, HalvingProducts):
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(4):
            with mode():
                loss = criterion("mean")(model(x[i : i + 1]), target[i : i + 1])
            own = torch.autograd.grad(loss, list(model.parameters()))
            factor = min(1.0, 0.1 / float(torch.cat([g.flatten() for g in own]).norm() + 1e-6))
            expected = [total + factor * g / 4 for total, g in zip(expected, own, strict=True)]
        module, optimizer, _ = make_private(
            copy.deepcopy(model), vector_data(8), "flash_clip", max_grad_norm=0.1, noise_multiplier=0.0
        )
        for _ in range(2):
            with mode():
                output = module(x)
            criterion("mean")(output, target).backward()
            with mode():
                optimizer.pre_step()
            torch.testing.assert_close([p.grad for p in optimizer.params], expected)
            optimizer.zero_grad()


def test_a_forward_that_sets_a_parameter_to_other_memory() -> None:
    class Setting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.set_(self.weight * 0.9)  # type: ignore[call-overload]
            return super().forward(x)

    module = GradSampleModuleFlashClip(nn.Sequential(nn.Linear(9, 9), Setting(9, 4)))
    with pytest.raises(MemprofError, match=r"forward writes to its parameter 1\.weight"):
        module(torch.randn(4, 9))


@pytest.mark.parametrize("has_scale", [True, False])
def test_an_output_that_compares_all_samples_is_named(has_scale: bool) -> None:
    """As in models of images and texts: the scale is the model's own parameter, so that the whole model is repeated."""

    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(9, 4), nn.Linear(5, 4)
            self.scale = nn.Parameter(torch.tensor(2.0)) if has_scale else torch.tensor(2.0)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            image, text = self.image(x), self.text(y)
            return {"image": image, "logits": self.scale.exp() * image @ text.T}

    with pytest.raises(MemprofError, match=r"an output of the model of shape \(3, 3\) mixes the 3 samples"):
        GradSampleModuleFlashClip(Compared())(torch.randn(6, 9), torch.randn(6, 5))


@pytest.mark.parametrize("begins_with", [None, torch.zeros(6, 4)])
def test_a_hidden_state_that_the_program_resets(begins_with: torch.Tensor | None) -> None:
    """To None before each call, which is no data; or to a tensor with the size of the batch."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.hidden = nn.GRUCell(9, 4), begins_with

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.cell(x, self.hidden)
            return self.hidden

    module = GradSampleModuleFlashClip(nn.Sequential(OrderedDict(inner=Recurrent())))
    if begins_with is None:
        module(torch.randn(6, 9))
        return
    advice = r"attribute inner\.hidden has a tensor with the size of this batch: make it in the model's"
    with pytest.raises(MemprofError, match=advice):
        module(torch.randn(6, 9))


def test_norms_of_the_step_before_cannot_weigh_losses() -> None:
    """They are numbers of other samples, which flash_clip itself has computed and gives to the program."""
    module, optimizer, _ = make_private(mlp().double(), vector_data(8), "flash_clip")

    def step(weight: float) -> None:
        losses = module(torch.randn(4, 9, dtype=torch.float64)).square().sum(1)
        (weight * losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1.0)
    print(float(module.per_sample_gradient_norms.max()))  # looking at them changes nothing
    step(2.0)

    def weighed_steps() -> None:
        for _ in range(3):
            step(float(module.per_sample_gradient_norms.mean()))

    with pytest.raises(MemprofError, match="left in an earlier step"):
        weighed_steps()


def _with_saved_tensors_hooks() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


class LikeACheckpoint(nn.Module):
    """Has saved-tensor hooks on while a local variable refers to a generator, as torch 2.11's checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hooks = _with_saved_tensors_hooks()
        next(hooks)
        if len(x) != 6:
            raise ValueError("only whole batches")
        out: torch.Tensor = self.last(x)
        next(hooks, None)
        return out


def test_a_proof_that_fails_leaves_no_saved_tensor_hooks() -> None:
    """Also while something refers to the error, as a debugger or a log does."""
    module = GradSampleModuleFlashClip(LikeACheckpoint(), loss_reduction="sum")
    with pytest.raises(MemprofError, match="not on some samples"):
        module(torch.randn(6, 3))
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    assert top(False) is None


def test_a_new_loss_with_detached_tensors_lasts_one_step() -> None:
    """It begins in step 11. Of the later steps, the 16th would be the first that is always checked."""
    mixing = _with_loss(lambda out, b: _entropy(out - out.mean(0).detach(), b), 11)
    sums: list[Any] = []
    message = _run(mixing, _Features, list(islice(cycle(_batches(0, "")), 16)), sums)
    assert "is not a sum, or a mean, of terms of one sample each" in message
    assert len(sums) == 11
