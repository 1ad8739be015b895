# SPDX-License-Identifier: Apache-2.0
"""Wide layers, trained by an object of the program's own that calls everything otherwise than Opacus' documentation."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, net, data):
        adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.net, self.adam, self.batches = PrivacyEngine().make_private(
            module=net,
            optimizer=adam,
            data_loader=DataLoader(data, batch_size=256),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )

    def fit(self):
        for x, y in self.batches:
            nn.functional.cross_entropy(self.net(x.cuda()), y.cuda()).backward()
            self.update()

    def update(self):
        self.adam.step()
        self.adam.zero_grad()


layers = nn.Sequential(nn.Linear(200, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 2)).cuda()
Trainer(layers, TensorDataset(torch.randn(768, 200), torch.randint(2, (768,)))).fit()
