# SPDX-License-Identifier: Apache-2.0
"""Detaching restores Opacus, torch and the program's objects exactly; attaching again starts anew."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import opacus
import opacus.utils.adaptive_clipping.adaptive_clipping_utils  # which is patched, and which opacus does not import
import pytest
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.optimizers import optimizer as optimizers
from torch import nn

from opacus_memprof import hooks
from opacus_memprof.recording import faults, native, observations
from opacus_memprof.recording.attachment import Attachment
from tests.integration.opacus_training import MODES, Training, attached, categories, cpu, prepare  # noqa: F401

# Opacus warns of first layers whose input needs no gradient, functorch of float64 under autocast.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:In CPU autocast")

HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def identities(table: dict[Any, Any]) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in table.items() if key != "__warningregistry__"]


def state_of_opacus() -> dict[str, Any]:
    """What every name in Opacus and in torch's ExpandedWeights refers to, in modules and in classes."""
    state: dict[str, Any] = {
        "grad samplers": identities(GradSampleHooks.GRAD_SAMPLERS),
        "norm samplers": identities(GradSampleHooksFastGradientClipping.NORM_SAMPLERS),
    }
    for name, module in list(sys.modules.items()):
        if name == "opacus" or name.startswith(("opacus.", "torch.nn.utils._expanded_weights")):
            state[name] = identities(vars(module))
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__.startswith("opacus."):
                    state[f"{value.__module__}.{value.__qualname__}"] = identities(dict(vars(value)))
    return state


def state_of(training: Training) -> dict[str, Any]:
    """What attaching may touch of a model and an optimizer."""
    state: dict[str, Any] = {}
    for name, module in training.model.named_modules():
        for table in HOOK_TABLES:
            state[f"{name} {table}"] = identities(getattr(module, table))
        state[f"{name} attributes"] = set(vars(module))
    for name, parameter in training.model.named_parameters():
        table = parameter._post_accumulate_grad_hooks
        state[f"{name} post-accumulate"] = None if table is None else identities(table)
        state[f"{name} attributes"] = set(vars(parameter))
    original = getattr(training.optimizer, "original_optimizer", training.optimizer)
    for name, optimizer in (("optimizer", training.optimizer), ("original", original)):
        tables = {key: identities(value) for key, value in vars(optimizer).items() if key.endswith("_hooks")}
        methods = {key: id(value) for key, value in vars(optimizer).items() if callable(value)}
        state[name] = (tables, methods, set(vars(optimizer)))
    return state


@pytest.mark.parametrize("mode", MODES)
def test_detach_restores_everything(mode: str) -> None:
    training = prepare(mode)
    before, opacus_before = state_of(training), state_of_opacus()

    with attached(training):
        changed = {key.removeprefix("_module.") for key, value in state_of(training).items() if value != before[key]}
        assert changed >= {"head attributes", "optimizer", "original"}
        assert state_of_opacus() != opacus_before

    assert state_of(training) == before
    assert state_of_opacus() == opacus_before
    training.run()


def test_opacus_is_restored_by_the_last_of_two() -> None:
    before = state_of_opacus()
    first, second = (hooks.attach_private(prepare(mode).prepared) for mode in ("hooks", "ghost"))
    patched = state_of_opacus()

    first.detach()
    assert state_of_opacus() == patched
    second.detach()

    assert state_of_opacus() == before


@pytest.mark.parametrize("mode", MODES)
def test_attaching_again_starts_anew(mode: str) -> None:
    training = prepare(mode)
    before, opacus_before = state_of(training), state_of_opacus()
    hooks.attach_private(training.prepared)
    once = {key: len(value) for key, value in state_of(training).items() if isinstance(value, list)}

    again = hooks.attach_private(training.prepared)
    assert {key: len(value) for key, value in state_of(training).items() if isinstance(value, list)} == once
    again.detach()

    assert state_of(training) == before
    assert state_of_opacus() == opacus_before


def test_somebody_elses_patches_stay() -> None:
    training = prepare("hooks")
    zeroed = []
    own = training.optimizer.zero_grad

    def zero_grad(set_to_none: bool = False) -> None:
        zeroed.append(set_to_none)
        own(set_to_none)

    training.optimizer.zero_grad = zero_grad
    handle = training.model.register_forward_hook(lambda module, args, output: output * 2)

    with attached(training):
        training.run()
        assert len(zeroed) == 4
    assert training.optimizer.zero_grad is zero_grad
    assert handle.id in training.model._forward_hooks


def test_second_make_private(cpu: None) -> None:  # noqa: F811
    """The same model and optimizer are made private again: steps count once."""
    others = categories()
    training = prepare("hooks")
    hooks.attach_private(training.prepared)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=training.model,
        optimizer=training.optimizer,
        data_loader=training.loader,
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    again = Training(model, optimizer, nn.CrossEntropyLoss(), loader, model)
    assert model is training.model
    before = native.step()

    with attached(again):
        again.run()
        counts = categories()

    size = 4 * sum(p.numel() for p in model.parameters())
    assert native.step() == (before[0] + 4, before[1] + 4)
    assert {name: counts[name] - others[name] for name in ("model_parameters", "gradients")} == {
        "model_parameters": size,
        "gradients": size,
    }
    assert vars(training.optimizer).keys().isdisjoint({"pre_step", "zero_grad", "add_noise"})


def test_engine_class_attaches_what_it_returns(cpu: None) -> None:  # noqa: F811
    opacus_before = state_of_opacus()
    attachment = hooks.attach_privacy_engine_class()
    try:
        hooked = prepare("hooks")
        assert observations.layer_shapes().engine_call == "make_private"
        # make_private_with_epsilon calls make_private: four objects under ghost clipping.
        model = nn.Linear(3, 2)
        prepared = opacus.PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=model,
            optimizer=prepare("vanilla", lambda: model).optimizer,
            data_loader=hooked.loader,
            target_epsilon=5.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
            grad_sample_mode="ghost",
        )
        assert [type(part).__name__ for part in prepared] == [
            "GradSampleModuleFastGradientClipping",
            "DPOptimizerFastGradientClipping",
            "DPLossFastGradientClipping",
            "DPDataLoader",
        ]
        assert observations.layer_shapes().engine_call == "make_private_with_epsilon"
        assert categories()["model_parameters"] >= 4 * sum(p.numel() for p in hooked.model.parameters())
        before = native.step()
        hooked.run()
        assert native.step()[0] == before[0] + 4
    finally:
        attachment.detach()

    assert state_of_opacus() == opacus_before
    hooked.run()
    assert native.step()[0] == before[0] + 4


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("modules.wrap_forwards", "the model's forward passes"),
        ("opacus_hooks.wrap_opacus_hooks", "Opacus' hooks of the model"),
        ("optimizer.register_step_hooks", "the optimizer's update"),
    ],
)
def test_a_part_that_fails_is_left_out(part: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are attached, and all is restored."""
    unattached = prepare("hooks").run()
    training = prepare("hooks")
    before, opacus_before = state_of(training), state_of_opacus()

    def fail(*args: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(f"opacus_memprof.hooks.{part}", fail)
    faults.clear()
    with pytest.warns(RuntimeWarning, match="no room"):
        attachment = hooks.attach_private(training.prepared)
    (sentence,) = faults.recorded()
    assert sentence.startswith(f"{name} could not be followed (RuntimeError: no room; ")
    assert state_of(training) != before
    assert state_of_opacus() != opacus_before
    assert training.run() == unattached
    attachment.detach()

    assert {key: value for key, value in state_of(training).items() if "attributes" not in key} == {
        key: value for key, value in before.items() if "attributes" not in key
    }
    assert state_of_opacus() == opacus_before


@pytest.mark.parametrize("fails", ["always", "once"])
def test_every_undo_is_attempted(fails: str) -> None:
    undone = []
    attachment = Attachment("a patch")

    def fail() -> None:
        if fails == "always" or "failed" not in undone:
            undone.append("failed")
            raise ValueError("no way back")
        undone.append("second attempt")

    attachment.on_detach(lambda: undone.append("first"))
    attachment.on_detach(fail)
    attachment.on_detach(lambda: undone.append("last"))
    faults.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attachment.detach()
    assert undone[:3] == ["last", "failed", "first"]
    if fails == "once":
        assert undone[3:] == ["second attempt"]
        assert faults.recorded() == []
    else:
        (sentence,) = faults.recorded()
        assert "undoing a patch (ValueError: no way back)" in sentence


def test_a_function_that_this_opacus_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_opacus()
    removed = optimizers._generate_noise
    monkeypatch.delattr(optimizers, "_generate_noise")
    faults.clear()
    with pytest.warns(RuntimeWarning, match="_generate_noise could not be followed"):
        attachment = hooks.attach_model(nn.Linear(2, 2))
    assert len(faults.recorded()) == 1
    assert state_of_opacus() != before
    attachment.detach()
    monkeypatch.undo()
    assert optimizers._generate_noise is removed
    assert state_of_opacus().keys() == before.keys()
