# SPDX-License-Identifier: Apache-2.0
"""grad_sample_mode="auto": which mode it picks, what it says, and whether another would have needed less memory."""

import gc
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.clipping import GradSampleModuleFlashClip, register_norm_samplers
from tests.integration.flash_clip_models import convnet, image_data, mlp, vector_data

Build = Callable[[], nn.Module]


class Language(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        output: torch.Tensor = self.head(x + self.block(x)).mean(1)
        return output


class Lora(nn.Module):
    """Frozen layers with trained matrices of rank 4 beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.relu(frozen(x) + up(down(x)))
        return x.mean(1)


class OverTokens(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = dense(*widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x).mean(1)
        return output


def dense(*widths: int) -> nn.Sequential:
    layers = [each for a, b in itertools.pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def images(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.GroupNorm(4, channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )


def make_private(model: nn.Module, inputs: torch.Tensor, mode: str, **options: Any) -> tuple[Any, ...]:
    data = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    prepared: tuple[Any, ...] = opacus_memprof.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=len(inputs)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **options,
    )
    return prepared


@pytest.mark.parametrize(
    ("build", "shape", "trained"),
    [
        (lambda: Language(50_000, 8), (2, 512), 50_000 * 8 + 16 + 8 * 32 + 32 + 32 * 8 + 8 + 8 * 50_000 + 50_000),
        (lambda: dense(8, 16, 4), (8, 8), 8 * 16 + 16 + 16 * 4 + 4),
        (lambda: images(16), (4, 3, 32, 32), 27 * 16 + 16 + 32 + 144 * 32 + 32 + 320 + 10),
        (lambda: Lora(64), (8, 16, 64), 3 * 2 * 4 * 64),
    ],
    ids=["huge vocabulary", "tiny", "convolutions", "LoRA"],
)
def test_flash_clip_comes_first(
    build: Build, shape: tuple[int, ...], trained: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "opacus_memprof.clipping"):
        model, _, _ = make_private(build(), torch.zeros(shape, dtype=torch.float32), "auto")
    assert isinstance(model, GradSampleModuleFlashClip)
    (line,) = caplog.messages
    assert line.startswith("grad_sample_mode='auto' is flash_clip here: ")
    assert f"keep {shape[0] * 4 * trained / 2**20:.1f} MiB of per-sample gradients" in line


def test_what_flash_clip_refuses_is_left_to_hooks(caplog: pytest.LogCaptureFixture) -> None:
    refused = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 2))
    model, _, _ = make_private(refused, torch.zeros(4, 2, dtype=torch.int64), "auto")
    assert isinstance(model, GradSampleModule)
    (line,) = caplog.messages
    assert line.startswith("grad_sample_mode='auto' is hooks here: ")
    assert "flash_clip does not support the model: layer '0' (Embedding) has max_norm=1.0" in line


def test_a_model_that_nothing_clips_is_opacus_to_refuse(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedModuleError):
        make_private(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.zeros(4, 4), "auto")
    assert "(BatchNorm1d) computes statistics of the whole batch" in caplog.text


@pytest.mark.parametrize("samples", [8, 16])
def test_ghost_is_for_large_gradients_with_a_criterion(samples: int, caplog: pytest.LogCaptureFixture) -> None:
    """10 million elements take 320 MB for 8 samples, and 2 of 16 MiB each are below the bound."""
    elements = 10_000_000 if samples == 8 else 4_000_000
    inputs, criterion = torch.zeros(samples, 2, dtype=torch.int64), nn.CrossEntropyLoss()
    large = samples * 4 * elements > 2**28
    build: Build = lambda: nn.Sequential(nn.Embedding(elements, 1, max_norm=1.0), nn.Flatten())  # noqa: E731
    restore = register_norm_samplers()
    try:
        model, _, returned, _ = make_private(build(), inputs, "auto", criterion=criterion)
        assert isinstance(model, GradSampleModuleFastGradientClipping) == large
        assert (returned is criterion) == (not large)
    finally:
        restore()
    alone, _, _ = make_private(build(), inputs, "auto")
    assert isinstance(alone, GradSampleModule)
    assert ("needs a criterion" in caplog.messages[-1]) == large


def test_a_criterion_is_returned_where_one_was_given() -> None:
    criterion = nn.CrossEntropyLoss()
    for mode, options in (("noise", {"noise_multiplier": 1.0}), ("epsilon", {"target_epsilon": 8.0})):
        for given in ({}, {"criterion": criterion}):
            model = mlp().double()
            data = vector_data(8)
            engine = opacus_memprof.PrivacyEngine(accountant="rdp")  # the default takes 4 s to find the noise
            budget = {} if mode == "noise" else {"target_delta": 1e-5, "epochs": 1}
            make = engine.make_private if mode == "noise" else engine.make_private_with_epsilon
            prepared = make(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=4),
                max_grad_norm=1.0,
                grad_sample_mode="auto",
                **options,
                **budget,
                **given,
            )
            assert isinstance(prepared[0], GradSampleModuleFlashClip)
            assert len(prepared) == 3 + len(given)
            assert not given or prepared[2] is criterion


def test_a_workspace_of_zero_bytes_is_refused_instead_of_hooks() -> None:
    model = convnet().double()
    with pytest.raises(opacus_memprof.MemprofError, match="workspace"):
        make_private(model, image_data(2).tensors[0], "auto", flash_clip_workspace_mb=0)
    assert not any(module._forward_hooks for module in model.modules())


def ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape)


CASES: dict[str, tuple[Build, Callable[[], torch.Tensor]]] = {
    "huge vocabulary": (lambda: Language(8000, 32), lambda: ids(8000, 4, 128)),
    "short sequences": (lambda: Language(500, 64), lambda: ids(500, 16, 16)),
    "long sequences": (lambda: Language(200, 32), lambda: ids(200, 4, 1024)),
    "tiny, large batch": (lambda: dense(8, 16, 4), lambda: torch.randn(2048, 8)),
    "tiny": (lambda: dense(8, 16, 4), lambda: torch.randn(8, 8)),
    "wide": (lambda: dense(512, 1024, 10), lambda: torch.randn(32, 512)),
    "wide, one sample": (lambda: dense(512, 1024, 10), lambda: torch.randn(1, 512)),
    "deep": (lambda: dense(*[256] * 7, 10), lambda: torch.randn(64, 256)),
    "convolutions": (lambda: images(16), lambda: torch.randn(16, 3, 32, 32)),
    "wide convolutions": (lambda: images(64), lambda: torch.randn(16, 3, 16, 16)),
    "LoRA": (lambda: Lora(128), lambda: torch.randn(8, 256, 128)),
    "LoRA, few tokens": (lambda: Lora(512), lambda: torch.randn(8, 4, 512)),
    "dense over tokens": (lambda: OverTokens(32, 32, 32, 32), lambda: torch.randn(4, 2048, 32)),
    "as many tokens as rank": (lambda: OverTokens(256, 256, 256, 256), lambda: torch.randn(8, 128, 256)),
}
SMALL = 64 * 2**10  # bytes that no allocation of a GPU is without


def peak(build: Build, inputs: Callable[[], torch.Tensor], mode: str, directory: Path) -> int:
    """The highest requested bytes of two steps."""
    gc.collect()  # what the mode before has left
    torch.manual_seed(0)
    model, data = build(), inputs()
    targets = torch.zeros(len(data), dtype=torch.int64)
    with opacus_memprof.profile(directory, device="cpu") as session:
        # A step's memory, without the proof of the first.
        check = {"check": "off"} if mode == "auto" else {}
        prepared = make_private(model, data, mode, criterion=nn.CrossEntropyLoss(), **check)
        private, optimizer = prepared[:2]
        criterion = prepared[2] if len(prepared) == 4 else nn.CrossEntropyLoss()
        for _ in range(2):
            criterion(private(data), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.peak()["cpu"].requested_bytes


@pytest.mark.slow
def test_no_other_mode_needs_less_memory(tmp_path: Path) -> None:
    """In 9 of 10 configurations, to 2 %."""
    worse = {}
    for name, (build, inputs) in CASES.items():
        chosen = peak(build, inputs, "auto", tmp_path)
        peaks = {mode: peak(build, inputs, mode, tmp_path) for mode in ("hooks", "ghost")}
        restore = register_norm_samplers()
        try:
            peaks["ghost with norm samplers"] = peak(build, inputs, "ghost", tmp_path)
        finally:
            restore()
        if chosen > 1.02 * min(peaks.values()) + SMALL:
            worse[name] = (chosen, peaks)
    assert len(worse) <= len(CASES) / 10, worse
