# SPDX-License-Identifier: Apache-2.0
"""Random numbers that runs share: they must be what torch draws, with the generator's state after it."""

import os
from collections.abc import Callable

import pytest
import torch

from opacus_memprof.planning.run_process import KeptDraws

LARGE = 2**19  # elements; 2 MiB

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: torch.empty(LARGE).normal_(),
    "another deviation": lambda: torch.empty(LARGE).normal_(0, 0.02),
    "by name": lambda: torch.empty(LARGE).normal_(mean=1, std=2, generator=None),
    "another shape": lambda: torch.empty(512, LARGE // 512 + 1).normal_(),
    "uniform": lambda: torch.empty(LARGE).uniform_(-1, 3),
    "float64": lambda: torch.empty(LARGE, dtype=torch.float64).normal_(),
    "bfloat16": lambda: torch.empty(LARGE, dtype=torch.bfloat16).normal_(),
    "kaiming": lambda: torch.nn.Linear(600, 900).weight.detach(),
    "small": lambda: torch.empty(100).normal_(),
    "of columns": lambda: torch.zeros(1024, 1024).normal_().t()[::2].normal_(),
    "own generator": lambda: torch.empty(LARGE).normal_(generator=torch.Generator().manual_seed(7)),
    "a view": lambda: torch.zeros(2, LARGE)[1].normal_(),
    "vmap": lambda: torch.func.vmap(lambda x: x.normal_(), randomness="different")(torch.zeros(2, LARGE)),
}


def drawn(monkeypatch: pytest.MonkeyPatch, kept: KeptDraws | None) -> tuple[dict[str, list[torch.Tensor]], list[int]]:
    """All draws from two seeds with the generator's state after each, and the sizes that torch has drawn."""
    sizes: list[int] = []
    found: dict[str, list[torch.Tensor]] = {}
    with monkeypatch.context() as patch:
        for name in ("normal_", "uniform_"):
            original = getattr(torch.Tensor, name)

            def counting(tensor, *arguments, original=original, **named):  # type: ignore[no-untyped-def]
                sizes.append(tensor.numel())
                return original(tensor, *arguments, **named)

            counting.__name__ = name
            patch.setattr(torch.Tensor, name, counting)
        if kept is not None:
            kept.install(torch)
        for seed in (1, 2):
            for name, draw in DRAWS.items():
                torch.manual_seed(seed)
                torch.rand(3)
                value = draw()
                found[f"{name} {seed}"] = [value, torch.get_rng_state(), torch.rand(5)]
    return found, sizes


def test_shared_numbers_are_those_that_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptDraws()
    expected, _ = drawn(monkeypatch, None)
    first, _ = drawn(monkeypatch, kept)
    again, drawn_again = drawn(monkeypatch, kept)
    for found in (first, again):
        for name, tensors in expected.items():
            assert all(map(torch.equal, found[name], tensors)), name
    large = [size for size in drawn_again if size >= LARGE]
    assert len(large) == 2 * 3  # with their own generator, in vmap, and in columns
    assert all(value.is_contiguous() for value, *_ in (again["normal 1"], again["float64 1"]))


def test_numbers_of_another_process_are_used_and_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptDraws()
    expected, _ = drawn(monkeypatch, None)
    if os.fork() == 0:
        drawn(monkeypatch, kept)
        os._exit(0)
    assert os.wait()[1] == 0
    before = len([size for size in drawn(monkeypatch, KeptDraws())[1] if size >= LARGE])
    found, sizes = drawn(monkeypatch, kept)
    assert len([size for size in sizes if size >= LARGE]) < before / 2
    found["normal 1"][0].zero_()
    again, _ = drawn(monkeypatch, kept)
    assert all(map(torch.equal, again["normal 1"], expected["normal 1"]))


def test_errors_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for name in ("normal_", "uniform_"):
            patch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
        KeptDraws().install(torch)
        leaf = torch.empty(LARGE, requires_grad=True)
        with pytest.raises(RuntimeError, match="in-place"):
            leaf.normal_()
        with pytest.raises(RuntimeError, match="std"):
            torch.empty(LARGE).normal_(0, -1)
        with torch.no_grad():
            version = leaf._version
            assert leaf.normal_() is leaf
            torch.manual_seed(0)
            leaf.uniform_()
            torch.manual_seed(0)
            leaf.uniform_()
        assert leaf._version == version + 3
