# SPDX-License-Identifier: Apache-2.0
"""A Poisson batch that is larger than asked for: https://github.com/meta-pytorch/opacus/pull/192."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1000)).cuda()
optim = torch.optim.SGD(net.parameters(), lr=0.05)
dataset = TensorDataset(torch.randn(640, 1024), torch.randint(1000, (640,)))
dl = DataLoader(dataset, batch_size=8)
net, optim, dl = PrivacyEngine().make_private(
    module=net, optimizer=optim, data_loader=dl, noise_multiplier=1.1, max_grad_norm=1.0
)
for data, target in dl:
    optim.zero_grad()
    nn.functional.cross_entropy(net(data.cuda()), target.cuda()).backward()
    optim.step()
