# SPDX-License-Identifier: Apache-2.0
"""Outputs are collected with their graphs: https://discuss.pytorch.org/t/cuda-out-of-memory/449."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(16384, 512), torch.randint(4096, (16384,))), batch_size=1024)
outputs = []
for x, y in loader:
    optimizer.zero_grad()
    output = model(x.cuda())
    loss = nn.functional.cross_entropy(output, y.cuda())
    loss.backward()
    optimizer.step()
    outputs.append(output)
