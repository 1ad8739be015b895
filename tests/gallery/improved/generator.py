# SPDX-License-Identifier: Apache-2.0
"""A private discriminator and a generator with an optimizer of its own."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784), nn.Tanh()
).cuda()
discriminator = nn.Sequential(
    nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)
).cuda()
optimizer_g, optimizer_d = (
    torch.optim.Adam(generator.parameters(), 2e-4),
    torch.optim.Adam(discriminator.parameters(), 2e-4),
)
loader = DataLoader(TensorDataset(torch.randn(256, 784)), batch_size=64)
discriminator, optimizer_d, loader = PrivacyEngine().make_private(
    module=discriminator,
    optimizer=optimizer_d,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
bce = nn.BCEWithLogitsLoss()
for (x,) in loader:
    x = x.cuda()
    b = len(x)
    z = torch.randn(b, 64, device="cuda")
    optimizer_d.zero_grad(set_to_none=True)
    fake = generator(z)
    loss = bce(discriminator(torch.cat([x, fake.detach()])), torch.cat([torch.ones(b, 1), torch.zeros(b, 1)]).cuda())
    loss.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    discriminator.disable_hooks()
    gl = bce(discriminator(fake), torch.ones(b, 1, device="cuda"))
    gl.backward()
    discriminator.enable_hooks()
    optimizer_g.step()
