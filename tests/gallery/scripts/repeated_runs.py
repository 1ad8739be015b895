# SPDX-License-Identifier: Apache-2.0
"""Five trainings in one process, as cells of a notebook that are run again: https://github.com/meta-pytorch/opacus/issues/575."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 2048), torch.randint(10, (64,)))
for seed in range(5):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 10)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for x, y in loader:
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
