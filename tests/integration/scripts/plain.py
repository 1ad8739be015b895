# SPDX-License-Identifier: Apache-2.0
"""Trains two models without Opacus, and keeps a copy of one that is not trained."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(critic.parameters())]
first = copy.deepcopy(model)
samples = torch.randn(8, 64)
with torch.no_grad():
    model(samples)
for step in range(3):
    drift = (model(samples) - first(samples)).square().mean()
    loss = critic(model(samples)).mean() + drift
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step} {loss.item()!r}", flush=True)
