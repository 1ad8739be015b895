# SPDX-License-Identifier: Apache-2.0
"""[fail]: a program that starts two ranks by itself, and then waits. With `fail` the second one raises."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FEATURES = 256


def train(rank: int, address: str) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", init_method=address, rank=rank, world_size=2)
    device = f"cuda:{rank}" if cuda else "cpu"
    model = torch.nn.Linear(FEATURES, FEATURES, bias=False, device=device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(8, FEATURES, device=device)).sum().backward()
        optimizer.step()
    if rank == 1 and sys.argv[2:] == ["fail"]:
        raise ValueError("broken")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(f"file://{sys.argv[1]}",), nprocs=2)
