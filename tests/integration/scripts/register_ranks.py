# SPDX-License-Identifier: Apache-2.0
"""A trainer that calls Opacus' wrap_model and get_optimizer_class on two ranks over gloo.

Prints the class of its flash_clip optimizer, and how far the clipped sum is from the one by hand on the samples of
both ranks.
"""

import copy
import socket
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import wrap_model
from opacus.optimizers import get_optimizer_class
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opacus_memprof import clipping
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.training import leave_group
from tests.integration.clipping_by_hand import Batch, by_hand

BOUND = 0.4
WRAPPERS = {
    "ddp": DistributedDataParallel,
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
    "fsdp2": FSDP2Wrapper,
}


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"]).square().sum(1)  # type: ignore[no-any-return]


def act(wrap: str, rank: int) -> str:
    """Takes one step. Returns the optimizer's class and the largest difference of a parameter."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    samples = torch.randn(8, 5, dtype=torch.float64)
    _, expected = by_hand(copy.deepcopy(plain), {"x": samples}, losses, BOUND)
    before = copy.deepcopy(plain.state_dict())
    model = WRAPPERS[wrap](plain)
    private: Any = wrap_model(model, grad_sample_mode="flash_clip", batch_first=True, loss_reduction="sum")
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "expected_batch_size": 4, "loss_reduction": "sum"}

    def make(distributed: bool) -> Any:
        cls = get_optimizer_class("flat", distributed, "flash_clip")
        return cls(optimizer=torch.optim.SGD(private.parameters(), lr=1.0), **arguments)

    if wrap != "fsdp2":
        with pytest.raises(MemprofError, match="call get_optimizer_class with distributed=True"):
            make(distributed=False)
    optimizer = make(distributed=True)
    losses(private, {"x": samples[4 * rank : 4 * rank + 4]}).sum().backward()
    optimizer.step()
    worst = 0.0
    for (name, old), new in zip(before.items(), model.parameters(), strict=True):
        whole: Any = new.full_tensor() if wrap == "fsdp2" else new  # type: ignore[attr-defined]
        worst = max(worst, float((old - whole.detach() - expected[name]).abs().max()))
    return f"{type(optimizer).__name__} {worst}"


def run(rank: int, port: int) -> None:
    torch.set_num_threads(1)  # see clip_ranks.py
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    clipping.register()
    for wrap in WRAPPERS:
        ended = act(wrap, rank)
        if rank == 0:
            print(wrap, ended, flush=True)
    leave_group()


def main() -> None:
    """Imports once, and forks the ranks."""
    warnings.simplefilter("ignore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(run, (port,), 2, start_method="fork")


if __name__ == "__main__":
    main()
