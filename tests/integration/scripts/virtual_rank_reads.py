# SPDX-License-Identifier: Apache-2.0
"""Decides by what other ranks give, in the lines that say so, and trains with DDP, which decides nothing."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank())
torch.cuda.set_device(device)

total = torch.ones(3, device=device)
dist.all_reduce(total)
print(total.tolist())
if total[0].item() > 1:  # decides
    print("many")
own = torch.arange(4.0, device=device)
dist.broadcast(own, src=rank)
if own[1].item() == 1:
    print("own")
sizes = torch.zeros(ranks, dtype=torch.long, device=device)
dist.all_gather_into_tensor(sizes, torch.tensor([5], device=device))
longest = torch.zeros(int(sizes.max().item()), device=device)  # decides
rows = torch.nonzero(sizes)  # decides
scattered = [torch.zeros(1, device=device)]
dist.reduce_scatter(scattered[0], [torch.ones(1, device=device)] * ranks)
order = list(range(int(scattered[0].item())))  # decides
if ranks > 1 and "simulated" in sys.argv:
    received = torch.zeros(1, dtype=torch.long, device=device)
    dist.recv(received, src=(rank + 1) % ranks)
    if received.item():  # decides
        print("received")
objects: list[Any] = [None] * ranks
dist.all_gather_object(objects, {"rank": rank})  # decides
if objects[-1]["rank"] < ranks - 1:
    print("copies")
if "simulated" not in sys.argv:
    assert objects == [{"rank": each} for each in range(ranks)]
    gathered: list[Any] = [None] * ranks
    dist.gather_object(rank, gathered if rank == 0 else None)
    assert gathered == (list(range(ranks)) if rank == 0 else [None] * ranks)

model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler()
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 64, device=device)).sum()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
dist.destroy_process_group()
