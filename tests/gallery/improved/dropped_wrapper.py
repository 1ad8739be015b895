# SPDX-License-Identifier: Apache-2.0
"""A module that trains itself, as Lightning's do: what make_private wraps it in is dropped, and its hooks stay."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Texts(nn.Module):
    def __init__(self, vocabulary=4000, width=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.out = nn.Linear(width, 20)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.out((x + self.down(torch.relu(self.up(x)))).amax(1))

    def configure(self, loader):
        optimizer = torch.optim.Adam(self.parameters())
        _, optimizer, loader = PrivacyEngine().make_private(
            module=self,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        return optimizer, loader

    def fit(self, loader):
        optimizer, loader = self.configure(loader)
        for ids, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self(ids.cuda()), y.cuda()).backward()
            optimizer.step()


data = TensorDataset(torch.randint(4000, (96, 128)), torch.randint(20, (96,)))
Texts().cuda().fit(DataLoader(data, batch_size=32))
