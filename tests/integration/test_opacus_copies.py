# SPDX-License-Identifier: Apache-2.0
"""Copies of a profiled model are plain Opacus models: they behave as without the profiler, and load without it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.utils.module_utils import clone_module
from torch import nn

from opacus_memprof import hooks
from tests.integration.opacus_training import VOCABULARY, attached, batches, prepare

# Opacus warns of first layers whose input needs no gradient, functorch of float64 under autocast.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:In CPU autocast")


def hooks_of(model: nn.Module) -> list[Any]:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    return [hook for module in model.modules() for table in tables for hook in getattr(module, table).values()]


def is_profiler_hook(hook: Any) -> bool:
    return type(hook).__module__.startswith("opacus_memprof")


def outcome(copied: nn.Module) -> Any:
    """The result of a forward pass, or the error that Opacus' copies raise in one."""
    tokens, _ = next(iter(batches()))
    try:
        return copied(tokens).detach()
    except Exception as error:
        return type(error), str(error)


def saved(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


@pytest.mark.parametrize("make_copy", [copy.deepcopy, saved, clone_module, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("mode", ["vanilla", "hooks", "ew", "ghost"])
def test_copies_behave_as_without(mode: str, make_copy: Any) -> None:
    plain = prepare(mode)
    plain.run()
    expected = outcome(make_copy(plain.model))

    training = prepare(mode)
    with attached(training):
        training.run()
        copied = make_copy(training.model)
        assert any(is_profiler_hook(hook) for hook in hooks_of(training.model))

    assert not any(is_profiler_hook(hook) for hook in hooks_of(copied))
    result = outcome(copied)
    assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result == expected
    for a, b in zip(copied.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_functorch_prepares_copies_without_hooks() -> None:
    """Functorch deep-copies each layer and runs the copy under vmap, where no hook of ours may fire."""
    expected = prepare("functorch", noise_multiplier=0.0).run()

    vanilla = prepare("vanilla")
    with attached(vanilla):
        private = prepare("functorch", lambda: vanilla.model, noise_multiplier=0.0)
        assert private.run() == expected


LOAD = """
import sys, torch
sys.modules["opacus_memprof"] = None  # as if it were not installed
model = torch.load(sys.argv[1], weights_only=False)
print(type(model).__name__, sum(p.numel() for p in model.parameters()))
if len(sys.argv) == 3:
    print(tuple(model(torch.ones(4, 3)).shape))
"""


def load_without_the_package(path: Path, *arguments: str) -> str:
    run = [sys.executable, "-c", LOAD, str(path), *arguments]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_saved_model_loads_without_the_package(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    attachment = hooks.attach_model(model)
    torch.save(model, tmp_path / "model.pt")
    attachment.detach()
    assert load_without_the_package(tmp_path / "model.pt", "run") == "Sequential 8\n(4, 2)\n"


def test_saved_opacus_model_loads_without_the_package(tmp_path: Path) -> None:
    training = prepare("hooks", lambda: nn.Sequential(nn.Embedding(VOCABULARY, 2), nn.Flatten(), nn.Linear(10, 3)))
    with attached(training):
        training.run()
        torch.save(training.model, tmp_path / "model.pt")
    assert load_without_the_package(tmp_path / "model.pt") == "GradSampleModule 55\n"
