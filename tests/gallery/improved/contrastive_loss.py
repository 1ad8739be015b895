# SPDX-License-Identifier: Apache-2.0
"""Contrastive learning whose loss, outside of the model, compares each sample with all others."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def contrast(left, right):
    both = nn.functional.normalize(torch.cat([left, right]), dim=-1)
    similar = both @ both.t() / 0.1
    similar = similar.masked_fill(torch.eye(len(both), device=both.device, dtype=torch.bool), -1e9)
    pairs = torch.arange(len(both), device=both.device).roll(len(left))
    return nn.functional.cross_entropy(similar, pairs)


net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 130)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.rand(192, 784), torch.rand(192, 784)), batch_size=64)
net, optimizer, loader = PrivacyEngine().make_private(
    module=net,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for left, right in loader:
    optimizer.zero_grad()
    first, second = net(torch.cat([left, right]).cuda()).chunk(2)
    loss = contrast(first, second)
    loss.backward()
    optimizer.step()
