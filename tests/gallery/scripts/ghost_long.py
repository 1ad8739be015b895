# SPDX-License-Identifier: Apache-2.0
"""Ghost clipping of long sequences, of tokens by tokens for each layer: https://arxiv.org/abs/2110.05679."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


model = Tagger().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
signals = TensorDataset(torch.randn(64, 4096, 64), torch.randint(4, (64,)))
model, optimizer, criterion, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    criterion=criterion,
    data_loader=DataLoader(signals, batch_size=16),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
    grad_sample_mode="ghost",
)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x.cuda()), y.cuda())
    loss.backward()
    optimizer.step()
