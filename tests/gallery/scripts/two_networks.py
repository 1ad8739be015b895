# SPDX-License-Identifier: Apache-2.0
"""A GAN with a private discriminator: the generator has gradients and states of its own from the second step on."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

generator = nn.Sequential(
    nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False),
    nn.GroupNorm(32, 512),
    nn.ReLU(),
    nn.ConvTranspose2d(512, 256, 4, 2, 1, bias=False),
    nn.GroupNorm(32, 256),
    nn.ReLU(),
    nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False),
    nn.GroupNorm(32, 128),
    nn.ReLU(),
    nn.ConvTranspose2d(128, 3, 4, 2, 1),
    nn.Tanh(),
).cuda()
discriminator = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(64, 128, 4, 2, 1),
    nn.GroupNorm(16, 128),
    nn.LeakyReLU(0.2),
    nn.Conv2d(128, 256, 4, 2, 1),
    nn.GroupNorm(16, 256),
    nn.LeakyReLU(0.2),
    nn.Conv2d(256, 1, 4, 1, 0),
    nn.Flatten(0),
).cuda()
for_generator = torch.optim.Adam(generator.parameters(), 2e-4)
optimizer = torch.optim.Adam(discriminator.parameters(), 2e-4)
discriminator, optimizer, loader = PrivacyEngine().make_private(
    module=discriminator,
    optimizer=optimizer,
    data_loader=DataLoader(TensorDataset(torch.randn(192, 3, 32, 32)), batch_size=64),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
for (real,) in loader:
    optimizer.zero_grad()
    made = generator(torch.randn(len(real), 100, 1, 1, device="cuda"))
    found = discriminator(torch.cat([real.cuda(), made.detach()]))
    wanted = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).cuda()
    binary_cross_entropy_with_logits(found, wanted).backward()
    optimizer.step()
    for_generator.zero_grad()
    discriminator.disable_hooks()
    found = discriminator(made)
    binary_cross_entropy_with_logits(found, torch.ones_like(found)).backward()
    for_generator.step()
    discriminator.enable_hooks()
