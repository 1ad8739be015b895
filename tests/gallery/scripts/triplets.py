# SPDX-License-Identifier: Apache-2.0
"""A triplet loss: one convolutional encoder runs three times in each forward pass."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, *images):
        return [nn.functional.normalize(self.head(self.features(each))) for each in images]


model = Encoder().cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(*(torch.randn(192, 3, 32, 32) for _ in range(3))), batch_size=64)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
loss_of = nn.TripletMarginLoss(margin=0.2)
for anchor, positive, negative in loader:
    optimizer.zero_grad()
    loss = loss_of(*model(anchor.cuda(), positive.cuda(), negative.cuda()))
    loss.backward()
    optimizer.step()
