# SPDX-License-Identifier: Apache-2.0
"""DP-SGD by hand, which keeps the gradients of each sample in a list."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(128, 1024).cuda(), torch.randint(10, (128,)).cuda()
for start in range(0, 128, 64):
    all_grads = []
    for i in range(start, start + 64):
        loss = nn.functional.cross_entropy(model(X[i : i + 1]), Y[i : i + 1])
        grads = torch.autograd.grad(loss, model.parameters())
        scale = (1 / torch.stack([g.norm() for g in grads]).norm()).clamp(max=1).item()
        all_grads.append([scale * g for g in grads])
    total = [sum(each) for each in zip(*all_grads, strict=True)]
    for p, t in zip(model.parameters(), total, strict=True):
        p.grad = (t + torch.randn_like(p)) / 64
    optimizer.step()
