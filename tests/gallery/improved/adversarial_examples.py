# SPDX-License-Identifier: Apache-2.0
"""Adversarial training: one step on the input, then one on the model; private."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1),
    nn.GroupNorm(4, 64),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 64, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
).cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.rand(256, 3, 32, 32), torch.randint(10, (256,))), batch_size=64)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
criterion = nn.CrossEntropyLoss()
for x, y in loader:
    x, y = x.cuda().requires_grad_(), y.cuda()
    criterion(model(x), y).backward()
    adversarial = (x + 0.03 * x.grad.sign()).detach()
    optimizer.zero_grad()
    loss = criterion(model(adversarial), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
