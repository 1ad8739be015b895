# SPDX-License-Identifier: Apache-2.0
"""Modules of what is allocated in backward, pass after pass, where activation checkpointing runs forwards inside of it.

The oracle: no two layers' weights have as many bytes, so a weight's gradient tells by its size whose it is.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opacus_memprof
from tests.event_rows import made_by_op

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
STEPS, BATCH = 4, 3
WIDTHS = {"stem": (8, 24), "block.outer": (24, 40), "block.inner": (40, 56), "head": (56, 72), "other": (56, 88)}


class Block(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(*WIDTHS["block.outer"]), nn.Linear(*WIDTHS["block.inner"])
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x).relu()
        if self.nested:
            return torch.as_tensor(checkpoint(self.inner, x, use_reentrant=True)).relu()  # type: ignore[no-untyped-call]
        return torch.as_tensor(self.inner(x)).relu()


class Checkpointed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(*WIDTHS["stem"]), Block(way == "nested")
        self.head, self.other = nn.Linear(*WIDTHS["head"]), nn.Linear(*WIDTHS["other"])
        self.reentrant: bool | None = way != "not reentrant"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        plain = self.reentrant is None
        block = self.block if plain else partial(checkpoint, self.block, use_reentrant=self.reentrant)
        x = block(self.stem(x).relu())
        return self.head(x), self.other(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "nested"])
def test_modules_in_backward(way: str, passes: int, device: str, tmp_path: Path) -> None:
    model = Checkpointed(way).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opacus_memprof.profile(tmp_path, device=device) as session:
        session.attach(model, optimizer)
        for step in range(STEPS):
            if step == STEPS - 1:
                model.reentrant = None  # what comes after checkpointing, too
                model.block.nested = False
            one, two = model(torch.randn(BATCH, WIDTHS["stem"][0], device=device))
            losses = [one.sum(), two.sum()] if passes == 2 else [one.sum() + two.sum()]
            for loss in losses:  # two: the second begins without a forward before it
                loss.backward(retain_graph=loss is not losses[-1])
            optimizer.step()
            optimizer.zero_grad()

    found = made_by_op(tmp_path, "AddmmBackward0")
    for step in range(STEPS):
        for layer, (before, after) in WIDTHS.items():
            size = 4 * before * after
            of_size = {module: count for (module, n), count in found[step].items() if n == size}
            times = 1 if layer in ("head", "other") else passes
            assert of_size == {layer: times}, f"step {step}: {size} bytes"
