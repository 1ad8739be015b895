# SPDX-License-Identifier: Apache-2.0
"""A data set that keeps every augmented sample on the GPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self, n=640):
        self.cache, self.n = {}, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = torch.randn(3, 224, 224, device="cuda"), i % 10
        return self.cache[i]


net = nn.Sequential(
    nn.Conv2d(3, 32, 7, 4, 3),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(1024, 10),
).cuda()
opt = torch.optim.Adam(net.parameters())
data = Cached()
loader = DataLoader(data, batch_size=64, shuffle=True)
for _ in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
