# SPDX-License-Identifier: Apache-2.0
"""Two steps of DP-SGD on batches that Poisson sampling draws: 40 of 2000 samples, on the average. A sample takes 4 MiB,
twice for a time."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(1024, 1024, bias=False).cuda()
data = TensorDataset(torch.zeros(2000, 1024))
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=40),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for step, (x,) in enumerate(loader):
    optimizer.zero_grad()
    model(x.cuda()).sum().backward()
    optimizer.step()
    if step == 1:
        break
