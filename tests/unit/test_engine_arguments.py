# SPDX-License-Identifier: Apache-2.0
"""make_private and make_private_with_epsilon: the names that they take, and what they refuse before any change."""

import contextlib
import inspect
from typing import Any

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.clipping import FlashClipEngineMixin, GradSampleModuleFlashClip
from opacus_memprof.errors import MemprofError

METHODS = ("make_private", "make_private_with_epsilon")
ALPHAS = [2.0, 8.0, 32.0]  # the default 150 take seconds
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 4.0,
}


class Engine(FlashClipEngineMixin, opacus.PrivacyEngine):
    """flash_clip on Opacus' own engine."""


def arguments(**changed: Any) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    return {name: value for name, value in {**given, **changed}.items() if value is not ...}


def with_budget(**changed: Any) -> dict[str, Any]:
    return arguments(noise_multiplier=..., target_epsilon=8.0, target_delta=1e-5, epochs=1, **changed)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [Engine, opacus_memprof.PrivacyEngine])
def test_the_signature_is_that_of_opacus_and_then_ours(engine: type, method: str) -> None:
    theirs = list(inspect.signature(getattr(opacus.PrivacyEngine, method)).parameters.values())
    ours = list(inspect.signature(getattr(engine, method)).parameters.values())
    names = [each.name for each in theirs[:-1]]
    assert [each.name for each in ours[: len(names)]] == names
    for own, other in zip(ours, theirs[:-1], strict=False):
        assert own.kind == other.kind
        assert own.name == "criterion" or own.default == other.default
    own_names = ["flash_clip_workspace_mb", "flash_clip_passes", "flash_clip_nonfinite", "check", "kwargs"]
    assert [each.name for each in ours[len(names) :]] == own_names


@pytest.mark.parametrize("mode", ["flash_clip", "hooks", "auto"])
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"max_grad_nrom": 2.0}, "does not know the argument max_grad_nrom: did you mean max_grad_norm?"),
        ({"frobnicate": 1}, "does not know the argument frobnicate: its arguments are batch_first, "),
        ({"alphas": [2]}, "does not know the argument alphas"),
        ({"max_clipbound": 2.0}, "max_clipbound belongs to clipping='adaptive'"),
        ({"noise_multiplier": -0.1}, "noise_multiplier is -0.1; it must be a finite number of at least 0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier is nan"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier is inf"),
        ({"noise_multiplier": "1"}, "noise_multiplier is '1'"),
        ({"noise_multiplier": None}, "noise_multiplier is None"),
        ({"noise_multiplier": True}, "noise_multiplier is True"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm is inf; clipping='flat' needs one positive and finite number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"max_grad_norm": [1.0]}, "max_grad_norm is .1.0.; clipping='flat' needs one"),
        (
            {"max_grad_norm": [1.0, float("inf")], "clipping": "per_layer"},
            "needs a list with one positive and finite number",
        ),
        ({"max_grad_norm": 1.0, "clipping": "per_layer"}, "needs a list with one positive and finite number"),
        ({"max_grad_norm": [], "clipping": "per_layer"}, "needs a list with one positive and finite number"),
        ({"check": "daily"}, "check is 'daily'; it must be 'first', 'sometimes', 'always' or 'off'"),
    ],
)
def test_refusals_leave_everything_as_it_was(mode: str, changed: dict[str, Any], sentence: str) -> None:
    given = arguments(grad_sample_mode=mode, **changed)
    with pytest.raises(MemprofError, match=sentence):
        opacus_memprof.PrivacyEngine().make_private(**given)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in given["module"].modules())
    assert not any(hasattr(parameter, "grad_sample") for parameter in given["module"].parameters())


@pytest.mark.parametrize("mode", ["flash_clip", "hooks"])
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"target_epsilon": float("nan")}, "target_epsilon is nan; it must be a positive"),
        ({"target_epsilon": -1.0}, "target_epsilon is -1.0"),
        ({"target_delta": 0.0}, "target_delta is 0.0; it must be between 0 and 1"),
        ({"target_delta": 1}, "target_delta is 1"),
        ({"epochs": 0}, "epochs is 0; it must be a positive"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm is inf"),
        ({"noise_multiplier": 1.0}, "make_private_with_epsilon does not know the argument noise_multiplier"),
    ],
)
def test_budgets_that_no_noise_keeps(mode: str, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MemprofError, match=sentence):
        Engine().make_private_with_epsilon(**{**with_budget(grad_sample_mode=mode), **changed})


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost", None])
@pytest.mark.parametrize("option", [{"flash_clip_passes": 1}, {"flash_clip_workspace_mb": 256.0}])
def test_options_of_flash_clip_with_another_mode(mode: str | None, option: dict[str, Any]) -> None:
    given = arguments(grad_sample_mode=mode or ..., **option)
    with pytest.raises(MemprofError, match=f"{next(iter(option))} is for grad_sample_mode='flash_clip' or 'auto', but"):
        Engine().make_private(**given)


def test_nonfinite_and_positions() -> None:
    with pytest.raises(MemprofError, match="flash_clip_nonfinite is 'skip'; it must be 'refuse' or 'drop'"):
        Engine().make_private(**arguments(grad_sample_mode="flash_clip", flash_clip_nonfinite="skip"))
    with pytest.raises(MemprofError, match="takes its arguments by name, but 2 came by position: write module="):
        Engine().make_private(nn.Linear(2, 2), None)  # type: ignore[misc]
    with pytest.raises(MemprofError, match="make_private_with_epsilon takes its arguments by name"):
        Engine().make_private_with_epsilon(nn.Linear(2, 2))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("accountant", "options"),
    [("rdp", {"alphas": ALPHAS}), ("prv", {"eps_error": 0.1}), ("gdp", {"poisson": True})],
)
def test_a_budget_takes_what_its_accountant_does(accountant: str, options: dict[str, Any]) -> None:
    for mode in ("flash_clip", "hooks")[: 1 if accountant == "prv" else 2]:  # of which each budget takes seconds
        engine = opacus_memprof.PrivacyEngine(accountant=accountant)
        given = with_budget(grad_sample_mode=mode, epsilon_tolerance=0.5, rand_on_empty=True, **options)
        _, optimizer, _ = engine.make_private_with_epsilon(**given)
        assert optimizer.noise_multiplier > 0
        with pytest.raises(MemprofError, match="make_private_with_epsilon does not know the argument steps"):
            engine.make_private_with_epsilon(**with_budget(grad_sample_mode=mode, steps=3))
        with pytest.raises(MemprofError, match=f"does not know the argument {next(iter(options))}"):
            engine.make_private(**arguments(grad_sample_mode=mode, **options))
    other = {"rdp": "eps_error", "prv": "poisson", "gdp": "alphas"}[accountant]
    with pytest.raises(MemprofError, match=f"does not know the argument {other}"):
        opacus_memprof.PrivacyEngine(accountant=accountant).make_private_with_epsilon(**with_budget(**{other: 1}))


@pytest.mark.parametrize("mode", ["flash_clip", "hooks"])
def test_adaptive_clipping_takes_its_own_arguments(mode: str) -> None:
    _, optimizer, _ = Engine(accountant="rdp").make_private(**arguments(grad_sample_mode=mode, **ADAPTIVE))
    assert optimizer.max_clipbound == 10.0
    given = with_budget(grad_sample_mode=mode, alphas=ALPHAS, **ADAPTIVE)
    _, optimizer, _ = Engine(accountant="rdp").make_private_with_epsilon(**given)
    assert optimizer.min_clipbound == 0.1


def test_options_reach_flash_clip_also_with_a_budget() -> None:
    given = with_budget(grad_sample_mode="flash_clip", alphas=ALPHAS, flash_clip_passes=2, flash_clip_workspace_mb=3.0)
    engine = Engine(accountant="rdp")
    module, _, _ = engine.make_private_with_epsilon(**given)
    assert isinstance(module, GradSampleModuleFlashClip)
    assert module.passes == 2
    # They do not outlive the call.
    module, _, _ = engine.make_private(**arguments(grad_sample_mode="flash_clip"))
    assert module.passes == "auto"


class Mixing(nn.Linear):
    """Adds a sample to another one, which only a proof with so many samples sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.cat([y[:4] + y.detach()[4:8].sum(0), y[4:]])


@pytest.mark.parametrize("make", [arguments, with_budget])
def test_flash_clip_is_checked_unless_it_is_off(make: Any) -> None:
    for check, is_refused in ((None, True), ("first", True), ("off", False)):
        model = Mixing(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        budget = {"alphas": ALPHAS} if make is with_budget else {}
        given = make(grad_sample_mode="flash_clip", module=model, optimizer=optimizer, check=check, **budget)
        engine = Engine(accountant="rdp")
        module, *_ = engine.make_private(**given) if make is arguments else engine.make_private_with_epsilon(**given)
        with pytest.raises(MemprofError, match="changes for a sample") if is_refused else contextlib.nullcontext():
            module(torch.randn(8, 3))


def test_secure_mode_reaches_the_optimizer() -> None:
    engine = Engine(accountant="rdp")
    engine.secure_mode, engine.secure_rng = True, torch.Generator()  # torchcsprng is not needed here
    _, optimizer, _ = engine.make_private(**arguments(grad_sample_mode="flash_clip"))
    assert optimizer.secure_mode
    assert optimizer.generator is engine.secure_rng


def test_ghost_has_the_default_criterion_of_opacus() -> None:
    *_, criterion, _ = Engine().make_private(**arguments(grad_sample_mode="ghost"))
    assert isinstance(criterion.criterion, nn.CrossEntropyLoss)
