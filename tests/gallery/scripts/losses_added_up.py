# SPDX-License-Identifier: Apache-2.0
"""Adds up the losses of a validation, in training mode: https://docs.pytorch.org/docs/stable/notes/faq.html."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of_batch():
    x, y = torch.randn(512, 512, device="cuda"), torch.randint(10, (512,), device="cuda")
    return nn.functional.cross_entropy(model(x), y)


for _ in range(2):
    for _ in range(3):
        optimizer.zero_grad()
        loss_of_batch().backward()
        optimizer.step()
    total = 0
    for _ in range(40):
        total += loss_of_batch()
    print(total / 40)
