# SPDX-License-Identifier: Apache-2.0
"""Exact on all ranks, or refused on all: programs that become wrong on one rank alone, cases of clip_ranks.py."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof.clipping.proof.situations import Situations
from opacus_memprof.errors import MemprofError
from tests.integration.flash_clip_models import criterion
from tests.integration.scripts.rank_training import (
    EXPECTED,
    WRAPPERS,
    ByHand,
    build,
    device,
    full,
    part,
    private,
    report,
    together,
)


class Faulty(nn.Module):
    """A network that can be told to do something for which clipping is not exact."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 8)
        self.head = nn.Linear(8, 4)
        self.fault = "none"
        self.extra: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        if self.fault == "mixes":
            h = h - 1e-3 * h.mean(0)
        elif self.fault == "detaches":
            return self.head(h).detach()
        elif self.fault == "beside" and self.training:
            self.extra = h.square().mean()
        output: torch.Tensor = self.head(h[:, None] if self.fault == "shapes" else h)
        return output.flatten(1)


def _unchanged(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(full(p), q) for p, q in zip(model.parameters(), before, strict=True))


def one_rank_finds(case: str, wrap: str) -> None:
    """What rank 1 alone finds, in its forward or its backward, is refused by all in the step, and training goes on."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    inner = Faulty().to(device(), torch.float64)
    model, optimizer, _ = private(WRAPPERS[wrap](inner), "mlp", noise_multiplier=1.0, poisson_sampling=False)
    words = {
        "mixes": "changes for a sample when other samples of the batch change|influence one another",
        "detaches": "no gradient (leads|reached)",
        "beside": "reaches the model beside its outputs",
        "batch norm": "statistics of the whole batch",
        "samples": "before a backward the same samples",
    }
    _step(model, optimizer, inner, 0)
    for fault, words_of_fault in words.items():
        state = {key: value.clone() for key, value in inner.state_dict().items()}
        momenta = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
        generator = optimizer.generator.get_state()
        with pytest.raises(MemprofError, match=words_of_fault if rank == 1 else "rank 1 could not take this step"):
            _step(model, optimizer, inner, 0, fault if rank == 1 else "none")
        assert torch.equal(optimizer.generator.get_state(), generator)
        assert all(torch.equal(value, state[key]) for key, value in inner.state_dict().items()), fault
        assert all(map(torch.equal, momenta, [s["momentum_buffer"] for s in optimizer.state.values()])), fault
        assert optimizer.bookkeeping.refusal.error is None
        assert optimizer.bookkeeping.passes == 0
        before = inner.head.weight.clone()
        _step(model, optimizer, inner, 0)
        assert not torch.equal(inner.head.weight, before), fault
    report(case, 0.0)


def _step(model: Any, optimizer: Any, inner: Faulty, number: int, fault: str = "none") -> None:
    batch = part("mlp", number, 0)
    inner.fault, inner.extra = fault, 0.0
    wrong = nn.BatchNorm1d(4).to(device(), torch.float64).requires_grad_(False) if fault == "batch norm" else None
    if wrong is not None:
        inner.wrong = wrong
    try:
        output = model(batch["x"])
        if fault == "samples":  # of two forwards for one backward
            output = torch.cat([output, model(batch["x"][:1])])
        loss = output.square().mean() + inner.extra
        if loss.requires_grad:  # else this rank's program has no backward
            loss.backward()
        optimizer.step()
    finally:
        optimizer.zero_grad()
        inner.fault = "none"
        if wrong is not None:
            del inner.wrong


def in_a_part(case: str) -> None:
    """A rank that finds something in the first of several physical batches goes on to the step, where all refuse.

    Ranks have different numbers of parts.
    """
    rank = dist.get_rank()
    torch.manual_seed(5)
    inner = Faulty().to(device(), torch.float64)
    model, optimizer, _ = private(WRAPPERS["ddp"](inner), "mlp")
    data = DataLoader(TensorDataset(torch.randn(8 + 4 * rank, 9, dtype=torch.float64)), batch_size=8 + 4 * rank)
    before = [p.clone() for p in inner.parameters()]
    seen = 0
    words = "influence one another|changes for a sample" if rank == 1 else "rank 1 could"
    manager = BatchMemoryManager(data_loader=data, max_physical_batch_size=4, optimizer=optimizer)
    with manager as loader, pytest.raises(MemprofError, match=words):  # noqa: PT012
        for (x,) in loader:
            inner.fault = "mixes" if rank == 1 and seen == 0 else "none"
            model(x.to(device())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    assert seen == 1 + rank  # the last part is refused
    assert _unchanged(inner, before)
    optimizer._step_skip_queue.clear()
    inner.fault = "none"
    _step(model, optimizer, inner, 0)
    assert not _unchanged(inner, before)
    report(case, 0.0)


def lockstep(case: str, wrap: str, name: str) -> None:
    """Under FSDP2 all ranks prove the same samples, also where one has none and where another checks again.

    Nothing is left whole, and gradients stay as they were.
    """
    hand = ByHand(name, 0.0, EXPECTED)
    model, optimizer, _ = private(WRAPPERS[wrap](build(name)), name, check="always")
    proved: list[int] = []
    original = Situations.prove

    def prove(self: Situations, entry: Any, args: Any, kwargs: Any, random: Any) -> Any:
        proved.append(len(args[0]))
        before = [p.grad for p in optimizer.params]
        situation = original(self, entry, args, kwargs, random)
        assert all(p.grad is g for p, g in zip(optimizer.params, before, strict=True))
        return situation

    with mock.patch.object(Situations, "prove", prove):
        for step in range(3):
            batch = part(name, step, dist.get_rank())
            optimizer.zero_grad()
            criterion("mean")(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            hand.step(together([part(name, step, rank) for rank in range(dist.get_world_size())]))
            model(part(name, 0, 0)["x"])  # a forward of all ranks without a backward
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, proved)
    assert len(proved) >= 6, proved
    assert all(each == proved for each in everyones), everyones
    optimizer.zero_grad()
    for module in optimizer._modules:
        module.reshard()
    assert all(isinstance(p, DTensor) and p.requires_grad and p.grad is None for p in model.parameters())
    report(case, hand.difference(model))


def mixing(case: str, wrap: str) -> None:
    """Samples that mix are refused on all ranks under FSDP2, in the forward, also where a rank has no samples."""
    rank = dist.get_rank()
    for fault in ("mixes", "none"):
        torch.manual_seed(5)
        inner = Faulty().to(device(), torch.float64)
        inner.fault = fault
        model, optimizer, _ = private(WRAPPERS[wrap](inner), "mlp")
        before = [full(p).clone() for p in model.parameters()]
        batch = part("mlp", 1, rank)  # empty on rank 0
        if fault == "mixes":
            with pytest.raises(
                MemprofError, match=r"influence one another|for a sample when other samples of the batch|could not"
            ):
                model(batch["x"])
            assert _unchanged(model, before)
        else:
            criterion("mean")(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            assert not _unchanged(model, before)
    # A rank alone that changes a mode that is refused.
    if rank == 1:
        inner.wrong = nn.BatchNorm1d(4).requires_grad_(False)
    with pytest.raises(MemprofError, match="statistics of the whole batch" if rank == 1 else "rank 1 could not"):
        model(batch["x"])
    report(case, 0.0)


CASES: dict[str, Callable[[str], None]] = {
    "ddp one rank finds": lambda case: one_rank_finds(case, "ddp"),
    "dpddp one rank finds": lambda case: one_rank_finds(case, "dpddp"),
    "ddp in a part": in_a_part,
    "fsdp2 lockstep": lambda case: lockstep(case, "fsdp2", "mlp"),
    "fsdp2 lockstep in blocks": lambda case: lockstep(case, "fsdp2_blocks", "transformer"),
    "fsdp2 mixing": lambda case: mixing(case, "fsdp2"),
}
