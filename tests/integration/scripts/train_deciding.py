# SPDX-License-Identifier: Apache-2.0
"""Training that takes more memory where a large tensor has values above 0, which a virtual GPU does not compute."""

import sys

import torch
from torch import nn

from opacus_memprof import virtual_gpu

model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.rand(1024, 1024, device="cuda")
for _ in range(2):
    optimizer.zero_grad()
    planned = len(sys.argv) > 1 and virtual_gpu.active() is not None
    more = planned or bool((x @ x > 0).any())
    tensor = torch.empty(2**28 if more else 1, dtype=torch.uint8, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    del tensor
