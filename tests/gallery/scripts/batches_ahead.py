# SPDX-License-Identifier: Apache-2.0
"""A queue of batches is on the GPU, to hide the time that copying takes."""

from collections import deque

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
batches = iter([(torch.randn(32, 3, 192, 192), torch.randint(10, (32,))) for _ in range(24)])
queue = deque()


def fill():
    while len(queue) < 16 and (batch := next(batches, None)) is not None:
        queue.append(tuple(part.cuda(non_blocking=True) for part in batch))


fill()
while queue:
    x, y = queue.popleft()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    fill()
