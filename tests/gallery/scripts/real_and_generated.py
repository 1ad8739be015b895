# SPDX-License-Identifier: Apache-2.0
"""A discriminator that gets real and generated images in one batch, twice as large as the loader's."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ndf, nz = 96, 64
device = torch.device("cuda")
generator = nn.Sequential(nn.ConvTranspose2d(nz, 32, 8), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 4), nn.Tanh()).to(
    device
)
discriminator = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(ndf * 4, 1, 4),
    nn.Flatten(0),
).to(device)
optimizer = torch.optim.SGD(discriminator.parameters(), lr=2e-4)
dataloader = DataLoader(TensorDataset(torch.randn(96, 1, 32, 32)), batch_size=32)
discriminator, optimizer, dataloader = PrivacyEngine().make_private(
    module=discriminator,
    optimizer=optimizer,
    data_loader=dataloader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for (real,) in dataloader:
    optimizer.zero_grad()
    with torch.no_grad():
        fake = generator(torch.randn(len(real), nz, 1, 1, device=device))
    output = discriminator(torch.cat([real.to(device), fake]))
    labels = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(device)
    nn.functional.binary_cross_entropy_with_logits(output, labels).backward()
    optimizer.step()
