# SPDX-License-Identifier: Apache-2.0
"""Training runs that run out of memory, each for a reason of its own, and what happens when advice is followed.

A plan is trained three times: without a limit, for the peak that it needs; with less than that, until it fails; and
with the change that the report's first suggestion names, under the same limit. Small on the CPU, large on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

import opacus_memprof
from opacus_memprof.clipping import adopt_grad_samples, register_norm_samplers
from opacus_memprof.pytest_plugin.clean_session import empty_caches
from opacus_memprof.recording import native
from tests.models import MeanCrossEntropy
from tests.planted_models import (
    Bag,
    Transformer,
    adapters,
    convolutions,
    deep_mlp,
    images,
    labelled_texts,
    llama,
    mlp,
    sequences,
    tagged_texts,
    tagger,
    texts,
    vectors,
)


@dataclass(frozen=True)
class Plan:
    """A run.

    `build` and `batch` take the plan, whose sizes differ by device; `limit` is the part of its own peak that it gets;
    `quirk` is what is wrong with its loop.
    """

    name: str
    build: Callable[[dict[str, int]], nn.Module]
    batch: Callable[[dict[str, int], int], tuple[torch.Tensor, torch.Tensor]]
    cpu: dict[str, int]
    cuda: dict[str, int]
    mode: str = "hooks"
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    limit: float = 0.7
    quirk: str = ""
    autocast: bool = False
    samples: tuple[int, ...] = ()  # of each step, where they differ

    def __str__(self) -> str:
        return self.name

    def sizes(self, device: str) -> dict[str, int]:
        return self.cpu if device == "cpu" else self.cuda


@dataclass(frozen=True)
class Outcome:
    """`peak` in requested bytes. The report is None where nothing failed."""

    peak: int
    phase: str
    error: BaseException | None
    report: dict[str, Any] | None


_MLP = {"in": 256, "hidden": 128, "out": 2000, "batch": 16}, {"in": 4096, "hidden": 2048, "out": 16000, "batch": 48}
_LONG = (
    {"in": 32, "out": 16, "layers": 3, "length": 512, "batch": 8},
    {"in": 256, "out": 64, "layers": 4, "length": 8192, "batch": 12},
)
_TEXT = (
    {"vocabulary": 100, "width": 32, "heads": 4, "blocks": 4, "length": 64, "batch": 8},
    {"vocabulary": 4000, "width": 512, "heads": 8, "blocks": 8, "length": 1024, "batch": 16},
)
_LORA = (
    {"in": 64, "rank": 4, "out": 8, "layers": 2, "length": 512, "batch": 6},
    {"in": 1024, "rank": 8, "out": 16, "layers": 4, "length": 8192, "batch": 8},
)
_WIDE = {"in": 512, "hidden": 512, "out": 512, "batch": 3}, {"in": 16384, "hidden": 16384, "out": 4096, "batch": 3}
_IMAGE = (
    {"channels": 16, "length": 48, "out": 10, "batch": 24},
    {"channels": 64, "length": 192, "out": 100, "batch": 96},
)

PLANS = (
    Plan("per-sample gradients of a big head", mlp, vectors, *_MLP),
    Plan("the same, tighter", mlp, vectors, *_MLP, limit=0.3),
    Plan("per-sample gradients and Adam", mlp, vectors, *_MLP, optimizer=torch.optim.Adam, limit=0.85),
    Plan("ghost clipping's T x T matrices", deep_mlp, sequences, *_LONG, mode="ghost"),
    Plan("activations of a long sequence", Transformer, texts, *_TEXT, limit=0.6),
    Plan("the same, in the first block", Transformer, texts, *_TEXT, limit=0.25),
    Plan("the same, in ghost clipping", Transformer, texts, *_TEXT, mode="ghost", limit=0.7),
    Plan(
        "LoRA with a long sequence",
        adapters,
        sequences,
        *_LORA,
        mode="ghost",
        limit=0.6,
    ),
    Plan(
        "noise of a big embedding",
        Bag,
        labelled_texts,
        {"vocabulary": 40000, "width": 32, "out": 4, "length": 8, "batch": 4},
        {"vocabulary": 1000000, "width": 512, "out": 4, "length": 16, "batch": 8},
        mode="ghost",
        limit=0.93,
    ),
    Plan("Adam's states in the first step", mlp, vectors, *_WIDE, optimizer=torch.optim.Adam, limit=0.85),
    Plan("temporaries of functorch", mlp, vectors, *_MLP, mode="functorch", limit=0.8),
    Plan("casts of bfloat16 in clipping", deep_mlp, vectors, {"in": 256, "out": 10, "layers": 3, "batch": 16},
         {"in": 4096, "out": 10, "layers": 3, "batch": 64}, autocast=True, limit=0.8),
    Plan("convolutions' unfolded inputs", convolutions, images, *_IMAGE, limit=0.7),
    Plan("a Poisson batch larger than those before", mlp, vectors, *_MLP, limit=0.8, samples=(8, 10, 6, 9, 16)),
    Plan(
        "outputs that are kept",
        Transformer,
        texts,
        _TEXT[0] | {"steps": 12},
        _TEXT[1] | {"steps": 24},
        quirk="outputs",
        limit=0.87,
    ),
    Plan("forwards without a backward", Transformer, texts, *_TEXT, quirk="captures", limit=0.8),
    Plan("fragments", mlp, vectors, *_MLP, quirk="fragments", limit=1.12),
    Plan("two processes on one GPU", mlp, vectors, *_MLP, quirk="crowd", limit=0.7),
)  # fmt: skip

_TAGS = {"vocabulary": 2000, "width": 768, "layers": 4, "length": 128, "batch": 640, "out": 2000}
_ADAM = torch.optim.AdamW


def _tags(name: str, build: Callable[[dict[str, int]], nn.Module], limit: float, mode: str = "hooks", **s: int) -> Plan:
    sizes = _TAGS | s
    return Plan(name, build, tagged_texts, sizes, sizes, mode=mode, optimizer=_ADAM, limit=limit)


# Runs that end in the first of the blocks that repeat, or before half of a model in which none does.
FIRST_BLOCK_PLANS = (
    Plan("attention, failed in the first block", Transformer, texts, *_TEXT, optimizer=_ADAM, limit=0.18),
    Plan("SwiGLU, failed in the first block", llama, texts, *_TEXT, optimizer=_ADAM, limit=0.18),
    Plan("convolutions, failed in the first", convolutions, images, *_IMAGE, optimizer=_ADAM, limit=0.1),
    Plan("LoRA, failed in the first", adapters, sequences, *_LORA, mode="ghost", limit=0.13),
)

# Models in which flash_clip needs the most at different instants, and runs that end early or late.
FLASH_CLIP_PLANS = (
    _tags("no operations between layers", tagger(), 0.3),
    _tags("GELU", tagger(nn.GELU), 0.36),
    _tags("GELU, failed in the first layers", tagger(nn.GELU), 0.05),
    _tags("norms", tagger(nn.GELU, normalized=True), 0.3),
    _tags("a head that is the largest", tagger(nn.GELU), 0.3, out=8000, batch=160),
    _tags("long, in ghost clipping", tagger(nn.GELU), 0.4, "ghost", length=1024, batch=80),
    _tags("wide, clipped sums the highest", tagger(nn.ReLU), 0.3, width=2048, length=32, batch=128),
    replace(_tags("one label", tagger(nn.GELU, pooled=True), 0.3, out=10), batch=labelled_texts),
    Plan("attention", Transformer, texts, *_TEXT, optimizer=_ADAM, limit=0.5),
    *FIRST_BLOCK_PLANS,
)


# --- a run ---


@dataclass(frozen=True)
class Changes:
    """What a suggestion's actions name."""

    mode: str = ""
    physical: int = 0
    drops_gradients: bool = False
    set_to_none: bool = False
    checkpoints: bool = False
    norm_samplers: bool = False
    adopts_samples: bool = False
    optimizer: str = ""
    setting: str = ""
    mends_quirk: bool = False

    @staticmethod
    def from_actions(actions: list[dict[str, Any]]) -> Changes:
        changes = Changes()
        for action in actions:
            kind, value = action["kind"], action.get("value")
            named = {
                "grad_sample_mode": {"mode": value},
                "max_physical_batch_size": {"physical": value},
                "drop_gradients": {"drops_gradients": True},
                "set_to_none": {"set_to_none": True},
                "checkpoint": {"checkpoints": True},
                "register_norm_samplers": {"norm_samplers": True},
                "adopt_grad_samples": {"adopts_samples": True},
                "optimizer": {"optimizer": value},
                "let_go": {"mends_quirk": True},
                "no_grad": {"mends_quirk": True},
                "other_processes": {"mends_quirk": True},
                "allocator_setting": {"setting": value},
            }[kind]
            changes = replace(changes, **named)
        return changes


def train(plan: Plan, device: str, directory: Path, limit: int = 0, changes: Changes | None = None) -> Outcome:
    """Trains under a profile in `directory`, with at most `limit` bytes (0: what there is)."""
    changes = changes or Changes()
    empty_caches()
    error = None
    surroundings = _crowded if plan.quirk == "crowd" and limit and not changes.mends_quirk else _limited
    if plan.quirk == "crowd" and changes.mends_quirk:
        limit = 0
    with _set(changes.setting), surroundings(device, limit), opacus_memprof.profile(directory, device=device):
        try:
            _train(plan, device, changes)
        except torch.OutOfMemoryError as raised:
            error = raised.with_traceback(None)
    ended = json.loads((directory / "profile.json").read_text())
    peak = ended["devices"][f"{device}:0" if device == "cuda" else device]["peak"]
    report = directory / "oom_report.json"
    return Outcome(
        peak["requested_bytes"], peak["phase"], error, json.loads(report.read_text()) if report.exists() else None
    )


@contextlib.contextmanager
def _limited(device: str, limit: int) -> Iterator[None]:
    """On the CPU, bytes that are there from before count."""
    if not limit:
        yield
    elif device == "cpu":
        native.cpu_limit(limit)
        try:
            yield
        finally:
            native.cpu_limit(0)
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def _crowded(device: str, limit: int) -> Iterator[None]:
    """Another process leaves `limit` bytes of the device."""
    torch.cuda.synchronize()
    bytes = torch.cuda.mem_get_info()[0] - limit
    hold = "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print(flush=True)"
    command = [sys.executable, "-c", f"{hold}; sys.stdin.read()", str(bytes - 600 * 2**20)]  # with its context
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"\n"
    try:
        yield
    finally:
        other.communicate()


@contextlib.contextmanager
def _set(setting: str) -> Iterator[None]:
    if not setting:
        yield
        return
    torch.cuda.memory._set_allocator_settings(setting)
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def _fragments() -> list[torch.Tensor]:
    """Half of 8 GiB, in pieces of 64 MiB between which as much is free."""
    whole = torch.empty(2**33, dtype=torch.uint8, device="cuda")
    del whole
    pieces = [torch.empty(2**26, dtype=torch.uint8, device="cuda") for _ in range(2**7)]
    return pieces[::2]


def _batches(plan: Plan, device: str) -> list[list[int]]:
    counts = plan.samples or (plan.sizes(device)["batch"],) * plan.sizes(device).get("steps", 2)
    if plan.samples:
        counts = tuple(count * plan.sizes(device)["batch"] // max(plan.samples) for count in plan.samples)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def _train(plan: Plan, device: str, changes: Changes) -> None:
    torch.manual_seed(0)
    sizes, mode = plan.sizes(device), changes.mode or plan.mode
    with torch.device(device):  # large weights would take seconds to draw on the CPU
        model = plan.build(sizes).train()
    model.checkpoints = changes.checkpoints
    batches = _batches(plan, device)
    data = torch.utils.data.TensorDataset(*plan.batch(sizes, batches[-1][-1] + 1))
    trained = [p for p in model.parameters() if p.requires_grad]
    make = getattr(torch.optim, changes.optimizer) if changes.optimizer else plan.optimizer
    with contextlib.ExitStack() as stack:
        if changes.norm_samplers:
            stack.callback(register_norm_samplers())
        if changes.adopts_samples:
            stack.callback(adopt_grad_samples())
        made = opacus_memprof.PrivacyEngine().make_private(
            module=model,
            optimizer=make(trained, lr=1e-3),
            criterion=MeanCrossEntropy(),
            data_loader=torch.utils.data.DataLoader(data, batch_sampler=batches),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
            # What is predicted is the peak of all steps but the first of flash_clip, which proves its clipping.
            check="off" if mode in ("flash_clip", "auto") else None,
        )
        module, optimizer, *criteria, loader = made
        criterion = criteria[0] if criteria else MeanCrossEntropy()
        if changes.drops_gradients:
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        if changes.physical:
            loader = stack.enter_context(
                BatchMemoryManager(data_loader=loader, max_physical_batch_size=changes.physical, optimizer=optimizer)
            )
        _loop(plan, device, module, optimizer, criterion, loader, changes)


def _loop(plan: Plan, device: str, module: Any, optimizer: Any, criterion: Any, loader: Any, changes: Changes) -> None:
    kept: list[Any] = _fragments() if plan.quirk == "fragments" else []
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=plan.autocast):
            output = module(inputs)
            loss = criterion(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(changes.set_to_none or changes.mode == "flash_clip")
        if plan.quirk == "outputs":
            kept.append(output.argmax(-1) if changes.mends_quirk else output)
    if plan.quirk == "captures":
        for _ in range(10):
            with torch.set_grad_enabled(not changes.mends_quirk):
                criterion(module(inputs), targets)
