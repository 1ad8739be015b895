# SPDX-License-Identifier: Apache-2.0
"""Trains with small batches, then evaluates the whole test set at once."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(4),
    nn.Flatten(),
    nn.Linear(64 * 64, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(10, (256,)))
test_x, test_y = torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,))
loader = DataLoader(train, batch_size=64)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for _ in range(2):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(test_x.cuda())
        print("accuracy", (out.argmax(1) == test_y.cuda()).float().mean().item())
