# SPDX-License-Identifier: Apache-2.0
"""RANK RANKS: simulates a rank that trains two steps under FSDP2, and prints what it holds of each parameter."""

import json
import sys

from opacus_memprof import virtual_gpu

virtual_gpu.start("h100", count=8)
virtual_gpu.simulate_rank(int(sys.argv[1]), int(sys.argv[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

device = torch.device("cuda", dist.get_node_local_rank())
torch.cuda.set_device(device)
dist.init_process_group("nccl")
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(2050, 3000), nn.ReLU(), nn.LayerNorm(3000), nn.Linear(3000, 7, bias=False))
shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters())
losses = 0
for _ in range(2):
    loss = model(torch.randn(4, 2050, device=device)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses += loss.ndim == 0
shards = [
    (shapes[name], parameter._local_tensor.untyped_storage().nbytes()) for name, parameter in model.named_parameters()
]
print(json.dumps({"parameters": shards, "rank": dist.get_rank(), "ranks": dist.get_world_size(), "losses": losses}))
dist.destroy_process_group()
