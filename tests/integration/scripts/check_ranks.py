# SPDX-License-Identifier: Apache-2.0
"""check= with Opacus' modes on two ranks over gloo: prints, for each case, what each rank's step ended with."""

import socket
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.training import leave_group

WRAPPERS = {"dpddp": DifferentiallyPrivateDistributedDataParallel, "fsdp2": FSDP2Wrapper}
CASES = (
    ("dpddp", "hooks", "exact"),
    ("dpddp", "ghost", "exact"),
    ("dpddp", "hooks", "fault"),
    ("fsdp2", "ghost_fsdp", "exact"),
    ("fsdp2", "ghost_fsdp", "dropout"),
    ("fsdp2", "ghost_fsdp", "sum"),
    ("fsdp2", "ghost_fsdp", "uneven"),
    ("fsdp2", "ghost_fsdp", "fault"),
    ("fsdp2", "ghost_fsdp", "mixing"),
    ("fsdp2", "ghost_fsdp", "mixing on rank 1"),
    ("fsdp2", "flash_clip", "late operations"),
    ("fsdp2", "flash_clip", "late operations on rank 1"),
    ("fsdp2", "flash_clip", "late mixing"),
    ("fsdp2", "flash_clip", "late mixing on rank 1"),
)


class Counter:
    """Counts steps where no proof looks."""

    __slots__ = ("steps",)


COUNTER = Counter()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.kind == "dropout":
            h = nn.functional.dropout(h, 0.4)
        if self.kind == "mixing" or (self.kind == "mixing on rank 1" and dist.get_rank() == 1):
            h = h - h.detach().mean(0)
        if self.kind.startswith("late") and COUNTER.steps and (dist.get_rank() == 1 or "rank" not in self.kind):
            h = h - h.mean(0) if "mixing" in self.kind else torch.sigmoid(h)
        output: torch.Tensor = self.second(h)
        return output


def ending(wrap: str, mode: str, kind: str) -> str:
    """Trains two steps. Returns "trained", or the error and whether parameters changed."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Model(kind)
    wrapped = WRAPPERS[wrap](plain)
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator))
    reduction = "sum" if kind == "sum" else "mean"
    private, optimizer, *criterion, _ = opacus_memprof.PrivacyEngine(accountant="rdp").make_private(
        module=wrapped,
        optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        loss_reduction=reduction,
        poisson_sampling=False,
        grad_sample_mode=mode,
        check="first" if kind.startswith("late") else "always",
    )
    compute = criterion[0] if criterion else nn.CrossEntropyLoss()
    samples = 4 - rank if kind == "uneven" else 4
    before = [local(p).clone() for p in wrapped.parameters()]
    COUNTER.steps = 0
    try:
        for start in (0, 4):
            if kind.startswith("late") and start:
                before = [local(p).clone() for p in wrapped.parameters()]
            x, y = data[start : start + samples]
            optimizer.zero_grad()
            compute(private(x), y).backward()
            if kind == "fault" and rank == 1:
                plant(plain, mode)
            optimizer.step()
            COUNTER.steps += 1
    except MemprofError as error:
        same = all(torch.equal(local(p), q) for p, q in zip(wrapped.parameters(), before, strict=True))
        return f"{error} {'Unchanged' if same else 'Changed'}."
    return "trained"


def plant(model: Any, mode: str) -> None:
    """Makes the gradient of one layer on this rank 10 % too large."""
    weight = model.second.weight
    if mode == "hooks":
        weight.grad_sample = 1.1 * weight.grad_sample
    else:
        weight.grad = 1.1 * weight.grad


def local(parameter: Any) -> torch.Tensor:
    own: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own.detach()


def run(rank: int, port: int) -> None:
    torch.set_num_threads(1)  # see clip_ranks.py
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for case in CASES:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, ending(*case))
        if rank == 0:
            for each, words in enumerate(found):
                print(f"{' '.join(case)} | {each} | {words}", flush=True)
    leave_group()


def main() -> None:
    """Imports once, and forks the ranks."""
    warnings.simplefilter("ignore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(run, (port,), 2, start_method="fork")


if __name__ == "__main__":
    sys.exit(main())
