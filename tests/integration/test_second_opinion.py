# SPDX-License-Identifier: Apache-2.0
"""The ledger against the tensors themselves: storages found by walking what Opacus, autograd and Python hold.

The walk knows nothing of tags or allocations: it reads attributes of parameters and modules, `_saved_*` of the
autograd graph, and the garbage collector's list of objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight

import opacus_memprof
from opacus_memprof.recording import native
from tests import models
from tests.models import MODELS, MODES, Model, Training
from tests.oracle.meter import no_collection

HELD_BY_OPACUS = ("activation_hooks_shared", "activation_hooks_opacus_only", "per_sample_gradients", "norm_samples",
                  "summed_gradients")  # fmt: skip
HELD_BY_TRAINING = ("model_parameters", "buffers", "gradients", "optimizer_states", "inputs")
# What only lives inside a phase. Between phases nothing may be left of it.
PASSING = ("temp_matrices", "backprop_copies", "noise", "optimizer_temporaries", "communication")


def addresses(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    """Of the storages; storages without memory have none, nor has an ExpandedWeight, which stands for a parameter."""
    real = (t for t in tensors if t is not None and not isinstance(t, ExpandedWeight))
    return {t.untyped_storage().data_ptr() for t in real} - {0}


def saved_by_autograd(root: Any) -> Iterator[torch.Tensor]:
    """Tensors that the graph's nodes have saved for backward; a node whose backward has run has none."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        if hasattr(node, "__dict__"):  # a Function written in Python; ExpandedWeights put their tensors right there
            names = ["saved_tensors", *vars(node)]
        for name in names:
            with suppress(RuntimeError):
                yield from tensors_in(getattr(node, name))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def storages_by_owner(training: Training, inputs: list[torch.Tensor], loss: Any) -> dict[str, set[int]]:
    """Category → addresses of the storages that are of that category by who holds them."""
    model, trained = training.module, list(training.parameters())
    activations = [getattr(module, "activations", ()) for module in model.modules()]
    captured = addresses(tensors_in(activations)) - addresses(inputs) - addresses(model.parameters())
    saved = addresses(saved_by_autograd(getattr(loss, "loss_per_sample", loss).grad_fn))
    return {
        "model_parameters": addresses(model.parameters()),
        "buffers": addresses(model.buffers()),
        "inputs": addresses(inputs),
        "gradients": addresses(p.grad for p in model.parameters()),
        "optimizer_states": addresses(tensors_in(list(training.optimizer.state.values()))),
        "activation_hooks_shared": captured & saved,
        "activation_hooks_opacus_only": captured - saved,
        "per_sample_gradients": addresses(p.grad_sample for p in trained),
        "norm_samples": addresses(getattr(p, "_norm_sample", None) for p in trained),
        "summed_gradients": addresses(p.summed_grad for p in trained),
    }


def assert_agree(training: Training, inputs: list[torch.Tensor], loss: Any, foreign: set[int]) -> None:
    """`foreign` blocks belong to what was there before."""
    by_category: dict[str, set[int]] = {}
    for block in native.live_blocks():
        if block["address"] not in foreign:
            by_category.setdefault(block["category"], set()).add(block["address"])
    walked = storages_by_owner(training, inputs, loss)
    for category in (*HELD_BY_OPACUS, *HELD_BY_TRAINING):
        assert by_category.get(category, set()) == walked[category], category
    for category in PASSING:
        assert not by_category.get(category), category


def assert_modules_agree(training: Training) -> None:
    """What hangs on a parameter belongs to one module, which has the parameter (DPLSTM renames its cells')."""
    modules = {block["address"]: block["module"] for block in native.live_blocks()}
    owners: dict[torch.Tensor, set[str]] = {}
    for name, module in training.module._module.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(name)
    for parameter, names in owners.items():
        attributes = ("grad", "grad_sample", "_norm_sample", "summed_grad")
        tensors = [parameter, *(getattr(parameter, name, None) for name in attributes)]
        tensors += training.optimizer.state.get(parameter, {}).values()
        found = {modules[address] for address in addresses(tensors)}
        assert len(found) == 1
        assert found <= names


def assert_every_block_has_an_owner(loss: Any, foreign: set[int]) -> None:
    objects = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))
    attributes = addresses(objects) | addresses(saved_by_autograd(getattr(loss, "loss_per_sample", loss).grad_fn))
    assert {block["address"] for block in native.live_blocks()} - foreign <= attributes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [m for m in MODELS if m.name in ("gpt2", "lstm")], ids=str)
def test_walked_storages_agree_with_the_ledger(model: Model, mode: str, tmp_path: Path) -> None:
    gc.collect()
    with opacus_memprof.profile(tmp_path / "profile", device="cpu") as session, no_collection():
        foreign = {block["address"] for block in native.live_blocks()}
        engine = PrivacyEngine()
        session.attach(engine)
        training = models.prepare(model, mode, engine=engine)
        for _ in range(2):  # with and without last step's gradients, norms and states
            inputs = list(model.batch(6))
            loss = training.criterion(training.module(inputs[0]), inputs[1])
            assert_agree(training, inputs, loss, foreign)
            assert_every_block_has_an_owner(loss, foreign)
            loss.backward()
            assert_agree(training, inputs, loss, foreign)
            if (
                mode == "no_op"
            ):  # the program computes them out of Opacus' sight: the optimizer's step is the first to know
                training.fill_grad_samples(*inputs)
            training.optimizer.step()
            assert_agree(training, inputs, loss, foreign)
            assert_modules_agree(training)
            training.optimizer.zero_grad()
            assert_agree(training, inputs, loss, foreign)
            assert_every_block_has_an_owner(loss, foreign)
            del loss
