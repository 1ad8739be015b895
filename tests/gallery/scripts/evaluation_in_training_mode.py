# SPDX-License-Identifier: Apache-2.0
"""Evaluates without torch.no_grad(), and without model.eval() too, after a training without Opacus."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(512, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()


def evaluate():
    x, y = torch.randn(2048, 3, 32, 32, device="cuda"), torch.randint(10, (2048,), device="cuda")
    return criterion(model(x), y).item()


for _ in range(2):
    for _ in range(3):
        x, y = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(10, (32,), device="cuda")
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    print(evaluate())
