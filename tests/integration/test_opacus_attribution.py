# SPDX-License-Identifier: Apache-2.0
"""Each block's category, module, phase and step, in a model of several layers, against arithmetic on its shapes."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleHooks, register_grad_sampler
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from opacus_memprof.recording import native
from tests.integration.opacus_training import (
    BATCH,
    CLASSES,
    LENGTH,
    MODES,
    VOCABULARY,
    WIDTH,
    Training,
    attached,
    categories,
    cpu,  # noqa: F401
    prepare,
)

# Opacus warns of first layers whose input needs no gradient, functorch of float64 under autocast.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:In CPU autocast")

# Elements of each module's parameters.
NUMEL = {
    "embed": VOCABULARY * WIDTH,
    "block.0": 2 * WIDTH,
    "block.1": (WIDTH + 1) * 4 * WIDTH,
    "head": (4 * WIDTH + 1) * CLASSES,
}
PARAMETERS = {name: 1 if name == "embed" else 2 for name in NUMEL}
FLOAT, INT = 4, 8
PHASES, KINDS = (
    native.names()["phases"],
    ("none", "alloc", "free", "retag", "step", "phase", "snapshot", "seed", "oom"),
)


def by_module(category: str) -> dict[str, int]:
    """Live bytes of a category, by module."""
    total: dict[str, int] = defaultdict(int)
    for block in native.live_blocks():
        if block["category"] == category:
            total[block["module"]] += block["bytes"]
    return dict(total)


@pytest.fixture
def alone(cpu: None) -> None:  # noqa: F811
    """Live blocks of these categories are this test's own."""
    gc.collect()
    assert by_module("gradients") == by_module("per_sample_gradients") == by_module("optimizer_states") == {}


def halves(training: Training) -> Iterator[str]:
    """One step, stopping after forward, backward, the update and zero_grad."""
    tokens, labels = next(iter(training.loader))
    loss = training.criterion(training.model(tokens), labels)
    yield "forward"
    loss.backward()
    del loss
    yield "backward"
    training.optimizer.step()
    yield "step"
    training.optimizer.zero_grad()
    yield "zero_grad"


@pytest.mark.parametrize("mode", MODES)
def test_every_block_is_its_modules(mode: str, alone: None) -> None:
    size = {name: FLOAT * numel for name, numel in NUMEL.items()}
    steps_counted = {name: 2 * FLOAT * NUMEL[name] + FLOAT * PARAMETERS[name] for name in NUMEL}  # Adam, on the CPU
    training = prepare(mode)
    with attached(training):
        assert by_module("model_parameters") == size
        for instant in halves(training):
            samples = {name: BATCH * bytes_ for name, bytes_ in size.items()}
            per_sample = mode in ("hooks", "functorch", "ew") and instant in ("backward", "step")
            assert by_module("per_sample_gradients") == (samples if per_sample else {})
            norms = {name: FLOAT * BATCH * PARAMETERS[name] for name in NUMEL}
            assert by_module("norm_samples") == (norms if mode == "ghost" and instant != "forward" else {})
            summed = mode != "vanilla" and instant == "step"
            assert by_module("summed_gradients") == (size if summed else {})
            # Plain optimizers drop gradients in zero_grad, Opacus' zero them; ExpandedWeights compute none.
            kept = {"forward": False, "backward": mode != "ew", "step": True, "zero_grad": mode != "vanilla"}[instant]
            assert by_module("gradients") == (size if kept else {})
            assert by_module("optimizer_states") == (steps_counted if instant in ("step", "zero_grad") else {})
            assert by_module("noise") == by_module("backprop_copies") == by_module("temp_matrices") == {}


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_captured_activations(mode: str, alone: None) -> None:
    """embed captures the batch, which stays an input; the others capture what a layer before them made."""
    positions = FLOAT * BATCH * LENGTH
    training = prepare(mode)
    with attached(training):
        steps = halves(training)
        next(steps)
        assert sum(by_module("inputs").values()) == INT * BATCH * (LENGTH + 1)  # with the labels
        # LayerNorm, Linear and Linear keep what they are given for their own backward as well.
        assert sum(by_module("activation_hooks_shared").values()) == positions * (WIDTH + WIDTH + 4 * WIDTH)
        assert by_module("activation_hooks_opacus_only") == {}
        names = native.names()["modules"]
        assert {names[module]: count for module, count in native.captures().items()} == dict.fromkeys(NUMEL, 1)
        next(steps)
        assert by_module("activation_hooks_shared") == by_module("activation_hooks_opacus_only") == {}
        assert native.captures() == {}


def events(directory: Path) -> Any:
    """The event file, read by the layout that csrc/core/event.h states."""
    words = np.fromfile(directory / "events.bin", dtype="<u8", offset=4096).reshape(-1, 4)
    count = int(np.fromfile(directory / "events.bin", dtype="<u8", count=1, offset=16)[0])
    time_, address, size, rest = words[:count].T
    return {
        "kind": time_ >> 48 & 0xFF,
        "category": time_ >> 56,
        "phase": address >> 48 & 0xFF,
        "size": size & ((1 << 48) - 1),
        "module": rest & 0xFFFF,
        "step": rest >> 32,
    }


ORDER = {
    "vanilla": ["forward", "optimizer_step", "idle", "STEP", "zero_grad", "idle"],
    "hooks": ["forward", "clip", "noise", "clip", "optimizer_step", "idle", "STEP", "zero_grad", "idle"],
    "ghost": ["forward", "zero_grad", "idle", "clip", "idle", "clip", "noise", "clip", "optimizer_step", "idle", "STEP",
              "zero_grad", "idle"],
}  # fmt: skip
MADE_IN = {
    "vanilla": {"idle", "forward", "backward", "optimizer_step"},
    "hooks": {"idle", "forward", "backward", "clip", "noise", "optimizer_step"},
    "ghost": {"idle", "forward", "backward", "second_backward", "clip", "noise", "optimizer_step"},
}


# Categories of blocks born in a phase; it may settle to another category.
MADE = {
    "forward": {"forward_undecided"},
    "second_backward": {"backward_temporaries"},
    "clip": {"clipping_temporaries", "summed_gradients"},
    "noise": {"noise", "gradients"},
    "optimizer_step": {"optimizer_temporaries"},
}


@pytest.mark.parametrize("mode", ["vanilla", "hooks", "ghost"])
def test_phases_and_steps(mode: str, cpu: None, tmp_path: Path) -> None:  # noqa: F811
    training = prepare(mode)
    with attached(training):
        training.run()  # lazy states
        native.start_events(str(tmp_path), 100_000, "{}")
        training.run()
        native.stop_events()

    read = events(tmp_path)
    marks = [
        "STEP" if KINDS[kind] == "step" else PHASES[phase]
        for kind, phase in zip(read["kind"], read["phase"], strict=True)
        if KINDS[kind] in ("step", "phase")
    ]
    assert marks == ORDER[mode] * 4
    born = read["kind"] == KINDS.index("alloc")
    assert {PHASES[phase] for phase in read["phase"][born]} == MADE_IN[mode]
    forward = born & (read["phase"] == PHASES.index("forward"))
    assert set(read["step"][forward].tolist()) == set(range(4))  # counted from where the events start
    names = native.names()["categories"]
    for phase, expected in MADE.items():
        inside = born & (read["phase"] == PHASES.index(phase))
        assert {names[category] for category in read["category"][inside]} <= expected


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_backward_blocks_know_their_module(mode: str, cpu: None, tmp_path: Path) -> None:  # noqa: F811
    training = prepare(mode)
    with attached(training):
        training.run()
        native.start_events(str(tmp_path), 100_000, "{}")
        training.run()
        native.stop_events()

    read = events(tmp_path)
    modules, names = native.names()["modules"], native.names()["categories"]
    for category in ("backprop_copies", "temp_matrices", "per_sample_gradients"):
        born = (read["kind"] == KINDS.index("alloc")) & (read["category"] == names.index(category))
        assert {modules[module] for module in read["module"][born]} <= set(NUMEL)
    copies = (read["kind"] == KINDS.index("alloc")) & (read["category"] == names.index("backprop_copies"))
    for name, width in (("embed", WIDTH), ("block.0", WIDTH), ("block.1", 4 * WIDTH), ("head", CLASSES)):
        mine = copies & (read["module"] == modules.index(name)) & (read["size"] > INT)  # the CPU boxes n
        assert read["size"][mine].tolist() == [FLOAT * BATCH * LENGTH * width] * 4  # backprops * n, once a step


def test_physical_and_logical_steps(cpu: None) -> None:  # noqa: F811
    """BatchMemoryManager splits each logical batch; a skipped step is not an update, and the sum waits for the rest."""
    training = prepare("hooks")
    with attached(training):
        before = native.step()
        with BatchMemoryManager(
            data_loader=training.loader, max_physical_batch_size=BATCH // 2, optimizer=training.optimizer
        ) as parts:
            for number, (tokens, labels) in enumerate(parts, start=1):
                training.step(tokens, labels)
                physical, logical = (now - then for now, then in zip(native.step(), before, strict=True))
                assert (physical, logical) == (number, number // 2)
                waiting = FLOAT * sum(NUMEL.values()) if number % 2 else 0
                assert categories()["summed_gradients"] == waiting
        assert number == 8


class Scale(nn.Module):
    """A layer that Opacus does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def scaled() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Scale(), nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES))


def test_sampler_that_is_registered_while_something_is_attached(cpu: None) -> None:  # noqa: F811
    try:
        with attached(prepare("hooks")):

            @register_grad_sampler(Scale)
            def sample(layer: Scale, activations: list[torch.Tensor], backprops: torch.Tensor) -> dict[Any, Any]:
                return {layer.weight: (activations[0] * backprops).sum(1)}

            training = prepare("hooks", scaled)
            with attached(training):
                for _ in range(2):
                    steps = halves(training)
                    assert [next(steps), next(steps)] == ["forward", "backward"]
                    samples = training.model._module[1].weight.grad_sample
                    assert samples.shape == (BATCH, WIDTH)
                    (found,) = (b for b in native.live_blocks() if b["address"] == samples.data_ptr())
                    assert (found["category"], found["module"]) == ("per_sample_gradients", "1")
                    list(steps)
        assert GradSampleHooks.GRAD_SAMPLERS[Scale] is sample
    finally:
        GradSampleHooks.GRAD_SAMPLERS.pop(Scale, None)
