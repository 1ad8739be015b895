# SPDX-License-Identifier: Apache-2.0
"""Training without privacy that adds up the gradients of four batches for one step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layers = [part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.GELU())]
model = nn.Sequential(nn.Linear(256, 2048), *layers, nn.Linear(2048, 8000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(16384, 256), torch.randint(8000, (16384,))), batch_size=2048)
for number, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / 4
    loss.backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
