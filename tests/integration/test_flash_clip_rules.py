# SPDX-License-Identifier: Apache-2.0
"""Per-layer, adaptive and automatic clipping in flash_clip mode.

Also torch.compile, autocast and dropout in modules of any kind, and drawn module graphs.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.integration.clipping_by_hand import Batch, by_flash_clip, by_hand, difference
from tests.integration.flash_clip_models import (
    Transformer,
    assert_same,
    make_private,
    mlp,
    token_data,
    train,
    vector_data,
)
from tests.integration.flash_clip_models import parameters as parameters_of
from tests.integration.test_flash_clip_modules import (
    WIDTH,
    DroppedGate,
    Experts,
    OwnParameters,
    Positions,
    Tied,
    Twice,
    losses,
    randomized,
    tokens,
    vectors,
)


@pytest.mark.parametrize("batch", [4, 2])
def test_per_layer_clipping_equals_hooks(batch: int) -> None:
    torch.manual_seed(0)
    model, results = Transformer().double(), []
    bounds = torch.linspace(0.01, 0.1, len(list(model.parameters()))).tolist()
    for mode in ("hooks", "flash_clip"):
        options = {"clipping": "per_layer", "max_grad_norm": bounds, "batch": batch, "noise_multiplier": 0.0}
        private = make_private(copy.deepcopy(model), token_data_of(12), mode, **options)
        train(private)
        results.append(parameters_of(private[0]))
    assert_same(results[1], results[0])


def token_data_of(samples: int) -> Any:
    torch.manual_seed(1)
    return token_data(samples)


@pytest.mark.parametrize(("bound", "largest"), [(0.3, 0.5), (2.5, 10.0)])  # all samples are clipped, and half of them
@pytest.mark.parametrize("passes", [1, 2])
def test_adaptive_clipping_equals_hooks(passes: int, bound: float, largest: float) -> None:
    torch.manual_seed(0)
    model, results, bounds = mlp().double(), [], []
    options = {
        "clipping": "adaptive",
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.5,
        "max_clipbound": largest,
        "min_clipbound": 0.01,
        "unclipped_num_std": 2.0,
    }
    for mode in ("hooks", "flash_clip"):
        torch.manual_seed(1)
        extra: dict[str, Any] = {"flash_clip_passes": passes} if mode == "flash_clip" else {}
        extra["max_grad_norm"] = bound
        private = make_private(copy.deepcopy(model), vector_data(12), mode, **options, **extra)
        train(private)
        results.append(parameters_of(private[0]))
        bounds.append(float(private[1].max_grad_norm))
    assert bounds[0] != bound  # it did adapt
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-6)  # Opacus computes the bound in float32
    assert_same(results[1], results[0], 1e-6)


def test_automatic_clipping_normalizes() -> None:
    torch.manual_seed(0)
    model, batch = randomized(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), vectors()()
    norms, found = by_flash_clip(model, batch, losses, 0.7, clipping="automatic")
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n, norm in enumerate(norms):
        _, gradient = by_hand(model, {"x": batch["x"][n : n + 1]}, losses, 1e9)
        for name, g in gradient.items():
            expected[name] += 0.7 / (norm + 0.01) * g
    assert_same(found, expected)


@pytest.mark.parametrize("build", [Twice, OwnParameters, mlp])
def test_compiled_models(build: Any) -> None:
    torch.manual_seed(0)
    model = randomized(build)
    width = 9 if build is mlp else WIDTH
    batch = {"x": torch.randn(4, 5, width, dtype=torch.float64)}

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(copy.deepcopy(model), backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

    _, expected = by_hand(model, batch, losses, 1.0)
    norms, _ = by_hand(model, batch, losses, 1.0)
    for _ in range(2):
        found_norms, found = by_flash_clip(Compiled(), batch, losses, 1.0)
        assert found_norms == pytest.approx(norms, rel=1e-8)
        assert_same({name.removeprefix("inner._orig_mod."): g for name, g in found.items()}, expected, 1e-8)


@pytest.mark.parametrize("build", [mlp, lambda: nn.Sequential(nn.Embedding(7, WIDTH), nn.LayerNorm(WIDTH))])
def test_compiled_autograd(build: Any) -> None:
    """It cannot run nodes in C++ that are not torch's."""
    torch.manual_seed(0)
    model = randomized(build)
    batch = {"x": torch.randn(4, 5, 9, dtype=torch.float64) if build is mlp else torch.randint(7, (4, 5))}
    _, expected = by_hand(model, batch, losses, 1.0)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        _, found = by_flash_clip(model, batch, losses, 1.0)
    torch._dynamo.reset()
    assert_same(found, expected, 1e-8)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled_in_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    "compiled",
    [lambda model: torch.compile(model, backend="aot_eager"), compiled_in_place, compiled_in_blocks],
    ids=["whole", "in place", "blocks"],
)
def test_models_compiled_before_they_are_private(compiled: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = Transformer().double(), dict(zip("xy", token_data(4).tensors, strict=True))

    def of_samples(module: nn.Module, of: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(module(of["x"]), of["y"], reduction="none").mean(1)

    norms, _ = by_hand(model, batch, of_samples, 1.0)
    bound = sorted(norms)[2]
    _, expected = by_hand(model, batch, of_samples, bound)
    options: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": bound, "loss_reduction": "sum"}
    module, optimizer, _ = make_private(compiled(model), token_data(8), "flash_clip", **options)
    for _ in range(2):
        optimizer.zero_grad()
        of_samples(module, batch).sum().backward()
        optimizer.pre_step()  # without the update
        assert_same({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("build", [Tied, lambda: Positions(1)])
def test_shared_layers_under_autocast(build: Any) -> None:
    torch.manual_seed(0)
    model, batch = build().train(), tokens()

    def in_bfloat16(module: nn.Module, inputs: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses(module, inputs)

    assert difference(model, batch, in_bfloat16) < 0.05
    assert difference(model, batch, losses) < 1e-4


@pytest.mark.parametrize("passes", [1, 2])
def test_random_numbers_are_the_forwards(passes: int) -> None:
    """One sample with dropout: the clipped gradient is that of the very masks that forward drew."""
    torch.manual_seed(0)
    model, x = randomized(DroppedGate), torch.randn(1, 5, WIDTH, dtype=torch.float64)
    torch.manual_seed(5)
    norms, expected = by_hand(model, {"x": x}, losses, 0.5)
    torch.manual_seed(5)
    found_norms, found = by_flash_clip(model, {"x": x}, losses, 0.5, passes=passes)
    assert found_norms == pytest.approx(norms, rel=1e-10)
    assert_same(found, expected)


class Drawn(nn.Module):
    """A graph of modules: some in sequence, some beside one another, some used again."""

    def __init__(self, plan: list[tuple[str, int]]) -> None:
        super().__init__()
        kinds: dict[str, Any] = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "own": OwnParameters,
            "experts": Experts,
            "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True),
            "prelu": nn.PReLU,
            "twice": Twice,
        }
        self.plan = plan
        self.parts = nn.ModuleList(kinds[kind]() for kind, _ in plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, (_, how) in zip(self.parts, self.plan, strict=True):
            if how == 0:
                x = part(x)
            elif how == 1:
                x = x[:, :3] + part(x)[:, :3]
            elif how == 2:
                x = part(part(x).tanh())
            else:
                x = part(x.flatten(0, 1).unsqueeze(1)).flatten(1).unflatten(0, (len(x), -1))[..., :WIDTH]
        return x


KINDS = ["linear", "norm", "own", "experts", "attention", "prelu", "twice"]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    plan=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=4),
    frozen=st.integers(0, 3),
    passes=st.sampled_from([1, 2]),
)
def test_drawn_graphs(plan: list[tuple[str, int]], frozen: int, passes: int) -> None:
    torch.manual_seed(0)
    model = randomized(lambda: Drawn(plan))
    if frozen < len(plan) - 1:
        model.parts[frozen].requires_grad_(False)  # type: ignore[union-attr,operator,index]
    model(vectors()()["x"])
    assert difference(model, vectors()(), losses, passes=passes) < 1e-8
