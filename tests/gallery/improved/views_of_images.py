# SPDX-License-Identifier: Apache-2.0
"""SimCLR without privacy: two views of each image, and a loss over all pairs of the batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

encoder = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 64),
).cuda()
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(768, 3, 32, 32)), batch_size=256)


def nt_xent(z, t=0.5):
    z = nn.functional.normalize(z, dim=1)
    sim = z @ z.T / t
    sim.fill_diagonal_(-1e9)
    n = len(z) // 2
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return nn.functional.cross_entropy(sim, target)


for (x,) in loader:
    x = x.cuda()
    views = torch.cat([x + 0.1 * torch.randn_like(x), x.flip(3)])
    loss = nt_xent(encoder(views))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
