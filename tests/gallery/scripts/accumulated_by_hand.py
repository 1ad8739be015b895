# SPDX-License-Identifier: Apache-2.0
"""Gradients of eight batches are accumulated for one step: https://github.com/meta-pytorch/opacus/issues/459."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 1024), torch.randint(10, (64,))), batch_size=4)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / 8
    loss.backward()
    if step % 8 == 7:
        optimizer.step()
        optimizer.zero_grad()
