# SPDX-License-Identifier: Apache-2.0
"""make_private, but the returned optimizer is thrown away: trains without privacy."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(
    nn.Conv1d(8, 128, 7, padding=3),
    nn.ReLU(),
    nn.Conv1d(128, 128, 7, padding=3),
    nn.ReLU(),
    nn.AdaptiveAvgPool1d(8),
    nn.Flatten(),
    nn.Linear(1024, 512),
    nn.ReLU(),
    nn.Linear(512, 5),
).cuda()
sgd = torch.optim.SGD(net.parameters(), lr=0.05)
signals = DataLoader(TensorDataset(torch.randn(512, 8, 512), torch.randint(5, (512,))), batch_size=64)
private, _, batches = PrivacyEngine().make_private(
    module=net, optimizer=sgd, data_loader=signals, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False
)
for x, y in batches:
    sgd.zero_grad()
    nn.functional.cross_entropy(private(x.cuda()), y.cuda()).backward()
    sgd.step()
