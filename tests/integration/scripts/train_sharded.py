# SPDX-License-Identifier: Apache-2.0
"""Two steps of a model of one matrix of 64 MiB, which FSDP2 shards over the ranks of the job."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

device = torch.device("cuda", dist.get_node_local_rank())
torch.cuda.set_device(device)
dist.init_process_group("nccl")
with torch.device("meta"):
    model = nn.Linear(4096, 4096, bias=False)
fully_shard(model)
model.to_empty(device=device)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.randn(4, 4096, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
