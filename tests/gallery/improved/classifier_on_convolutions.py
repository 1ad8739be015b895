# SPDX-License-Identifier: Apache-2.0
"""A VGG with a large classifier."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        layers, c = [], 3
        for width in (32, "M", 64, "M", 128, 128, "M", 256, 256, "M"):
            if width == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(c, width, 3, padding=1), nn.ReLU(inplace=False)]
                c = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(256 * 16, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 100))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


model = VGG().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(96, 3, 64, 64), torch.randint(100, (96,))), batch_size=32)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
criterion = nn.CrossEntropyLoss()
for x, y in loader:
    x, y = x.cuda(), y.cuda()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
