# SPDX-License-Identifier: Apache-2.0
"""A backbone and a head, each with an optimizer, without privacy; gradients are accumulated by hand."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Bottleneck(nn.Module):
    def __init__(self, c, m):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c, m, 1, bias=False),
            nn.BatchNorm2d(m),
            nn.ReLU(inplace=True),
            nn.Conv2d(m, m, 3, padding=1, bias=False),
            nn.BatchNorm2d(m),
            nn.ReLU(inplace=True),
            nn.Conv2d(m, c, 1, bias=False),
            nn.BatchNorm2d(c),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


backbone = nn.Sequential(
    nn.Conv2d(3, 128, 7, 2, 3),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    *[Bottleneck(128, 64) for _ in range(5)],
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
).cuda()
head = nn.Linear(128, 1000).cuda()
opt_backbone = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
opt_head = torch.optim.AdamW(head.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(96, 3, 96, 96), torch.randint(1000, (96,))), batch_size=24)
for i, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(head(backbone(x.cuda())), y.cuda(), label_smoothing=0.1) / 2
    loss.backward()
    if i % 2:
        opt_backbone.step()
        opt_head.step()
        opt_backbone.zero_grad()
        opt_head.zero_grad()
